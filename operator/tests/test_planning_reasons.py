"""Reasons of conditions and events are names that people and programs wait for: they are added to, never changed."""

from rljob.operator.planning import conditions, pod_diagnosis, reasons

FROZEN = {
    "APIRejected",
    "ClaimInUse",
    "VolumeClaimPending",
    "ConfigurationError",
    "ContainerCreateFailed",
    "DeadlineExceeded",
    "EngineReplaced",
    "Evaluating",
    "Failed",
    "Finishing",
    "NameConflict",
    "ImagePullFailed",
    "Initialized",
    "InitializerFailed",
    "Initializing",
    "InvalidSpec",
    "MaxRestartsExceeded",
    "NoInitializer",
    "PodsPending",
    "GangPending",
    "Queued",
    "PendingTimeout",
    "PodsForbidden",
    "QuotaExceeded",
    "Resumed",
    "CrashLoop",
    "PodsNotReady",
    "RunFailed",
    "Running",
    "ScaledIn",
    "ScaledOut",
    "Starting",
    "Succeeded",
    "Suspended",
    "Suspending",
    "TrainerRestarted",
    "TrainerRestarting",
}
ALL = {value for name, value in vars(reasons).items() if name.isupper()}


def test_reasons_are_frozen():
    assert ALL == FROZEN


def test_every_reason_is_valid_in_kubernetes():
    assert all(each.isalpha() and each[0].isupper() and len(each) < 64 for each in ALL)


def test_tables_of_reasons_contain_only_known_reasons():
    assert ALL >= conditions.NORMAL
    assert set(pod_diagnosis.SEVERITY) <= ALL
