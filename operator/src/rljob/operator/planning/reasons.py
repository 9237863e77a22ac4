"""Every reason that a condition or an event of an RLJob may have. A test freezes them: programs wait for them."""

from __future__ import annotations

# Ready, in the order of a job's life
INVALID_SPEC = "InvalidSpec"
FOREIGN_OBJECT = "ForeignObject"
CLAIM_IN_USE = "ClaimInUse"
QUOTA_EXCEEDED = "QuotaExceeded"
API_REFUSED = "ApiRefused"
INITIALIZING = "Initializing"
PODS_PENDING = "PodsPending"
IMAGE = "ImageCannotBePulled"
CONTAINER = "ContainerCannotBeMade"
CLAIM = "ClaimNotBound"
PODS_REFUSED = "PodsRefused"
CRASHING = "RolesCrashing"
TRAINER_RESTARTING = "TrainerRestarting"
ROLES_NOT_READY = "RolesNotReady"
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

# Failed; the coordinator's own reasons (status.run.reason) come as they are
INITIALIZER_FAILED = "InitializerFailed"
CONFIGURATION_ERROR = "ConfigurationError"
MAX_RESTARTS_EXCEEDED = "MaxRestartsExceeded"
DEADLINE_EXCEEDED = "DeadlineExceeded"
PODS_PENDING_TOO_LONG = "PodsPendingTooLong"
RUN_FAILED = "RunFailed"

# Events besides transitions
TRAINER_RESTARTED = "TrainerRestarted"
