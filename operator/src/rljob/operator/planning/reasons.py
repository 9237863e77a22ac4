"""All reasons of conditions and events of an RLJob. A test freezes them, because programs match on them."""

from __future__ import annotations

# Ready, in the order of a job's lifecycle
INVALID_SPEC = "InvalidSpec"
NAME_CONFLICT = "NameConflict"
CLAIM_IN_USE = "ClaimInUse"
QUOTA_EXCEEDED = "QuotaExceeded"
API_REJECTED = "APIRejected"
INITIALIZING = "Initializing"
QUEUED = "Queued"
GANG_PENDING = "GangPending"
PODS_PENDING = "PodsPending"
IMAGE_PULL_FAILED = "ImagePullFailed"
CONTAINER_CREATE_FAILED = "ContainerCreateFailed"
VOLUME_CLAIM_PENDING = "VolumeClaimPending"
PODS_FORBIDDEN = "PodsForbidden"
CRASH_LOOP = "CrashLoop"
TRAINER_RESTARTING = "TrainerRestarting"
PODS_NOT_READY = "PodsNotReady"
STARTING = "Starting"
RUNNING = "Running"
EVALUATING = "Evaluating"
FINISHING = "Finishing"
SUSPENDING = "Suspending"
SUSPENDED = "Suspended"
SUCCEEDED = "Succeeded"
FAILED = "Failed"

# Initialized, besides Initializing
INITIALIZED = "Initialized"
NO_INITIALIZER = "NoInitializer"

# Suspended, besides Suspended and Suspending
RESUMED = "Resumed"

# Failed; the reasons of the coordinator (status.run.reason) are used unchanged
INITIALIZER_FAILED = "InitializerFailed"
CONFIGURATION_ERROR = "ConfigurationError"
MAX_RESTARTS_EXCEEDED = "MaxRestartsExceeded"
DEADLINE_EXCEEDED = "DeadlineExceeded"
PENDING_TIMEOUT = "PendingTimeout"
RUN_FAILED = "RunFailed"

# Events besides transitions
TRAINER_RESTARTED = "TrainerRestarted"
ENGINE_REPLACED = "EngineReplaced"
SCALED_OUT = "ScaledOut"
SCALED_IN = "ScaledIn"
