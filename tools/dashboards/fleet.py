"""The dashboard of all jobs: which job needs attention, and how well the accelerators are used."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.panels import (
    GREEN,
    ORANGE,
    RED,
    Query,
    board,
    graph,
    number,
    over,
    rate,
    rows,
    section,
    variable,
)

JOBS = 'namespace=~"$namespace"'
OF_JOB = "by (namespace, rljob)"
NAME = "{{namespace}}/{{rljob}}"
ALERTS = 'ALERTS{alertname=~"RLJob.*", alertstate="firing", namespace=~"$namespace|"}'
ENGINE_SECONDS = rate("rljob_engine_seconds_total", JOBS)
GENERATING = rate("rljob_engine_seconds_total", f'{JOBS}, activity="generating"')
WAITING = rate("rljob_engine_seconds_total", f'{JOBS}, activity="waiting"')
TOKENS = rate("rljob_generated_tokens_total", JOBS)


def _jobs_in(states: str) -> str:
    return f'count(rljob_run_state{{{JOBS}, state=~"{states}"}} == 1) or vector(0)'


def _jobs_with(condition: str) -> str:
    """Return the number of RLJobs with a condition. Standby operators have no jobs in memory."""
    return (
        f'sum(max by (service, condition) (rljob_operator_jobs{{condition="{condition}", status="True"}})) or vector(0)'
    )


def dashboard() -> Dashboard:
    """Return the dashboard."""
    page = board(
        "RLJobs: fleet",
        "rljob-fleet",
        "All RLJobs. Start here: the alerts, then the table of jobs; a click on a job opens its dashboard.",
        [variable("namespace", "Namespace", "label_values(rljob_run_state, namespace)", several=True)],
    )
    page = section(
        page,
        "Now",
        number(
            "Alerts firing",
            "Alerts of rljob that fire now; the table below names them.",
            Query(f"count({ALERTS}) or vector(0)"),
            steps=((None, GREEN), (1, RED)),
        ),
        number(
            "Jobs that train",
            "Runs in the state Running, Evaluating or Finishing.",
            Query(_jobs_in("Running|Evaluating|Finishing")),
        ),
        number(
            "Jobs that start",
            "Runs whose engines or trainer are not connected yet. A job whose coordinator does not run is not counted "
            "here; `kubectl get rlj -A` has it.",
            Query(_jobs_in("Starting")),
        ),
        number(
            "Jobs failed",
            "RLJobs with the condition Failed, of all namespaces, until they are deleted.",
            Query(_jobs_with("Failed")),
            steps=((None, GREEN), (1, ORANGE)),
        ),
        number(
            "Jobs stalled",
            "RLJobs that only a user can help: failed, or with an invalid spec. Of all namespaces.",
            Query(_jobs_with("Stalled")),
            steps=((None, GREEN), (1, ORANGE)),
        ),
        number("Engines", "Engines connected to their coordinator.", Query(f"sum(rljob_engines{{{JOBS}}})")),
        number(
            "Tokens per second",
            "Tokens that all engines generate.",
            Query(f"sum({TOKENS})"),
            decimals=0,
        ),
        number(
            "Engine time used",
            "Share of the engines' time with requests. The rest is waiting, weight updates and restarts.",
            Query(over(f"sum({GENERATING})", f"sum({ENGINE_SECONDS})")),
            unit="percentunit",
            decimals=0,
            steps=((None, RED), (0.3, ORANGE), (0.6, GREEN)),
        ),
    )
    page = section(
        page,
        "What needs attention",
        rows(
            "Jobs",
            "One row for each run. Look for a state that is not Running, for a job whose tokens per second are 0, and "
            "for engines that are used little.",
            {
                "": Query("max by (namespace, rljob, state) (rljob_run_state" + f"{{{JOBS}}} == 1)"),
                "step": Query(f"max {OF_JOB} (rljob_policy_version{{{JOBS}}})"),
                "of": Query(f"max {OF_JOB} (rljob_training_steps{{{JOBS}}})"),
                "reward": Query(f"max {OF_JOB} (rljob_step_reward_mean{{{JOBS}}})"),
                "staleness": Query(f"max {OF_JOB} (rljob_step_staleness_mean{{{JOBS}}})"),
                "engines": Query(f"sum {OF_JOB} (rljob_engines{{{JOBS}}})"),
                "tokens/s": Query(f"sum {OF_JOB} ({TOKENS})"),
                "engine time used": Query(over(f"sum {OF_JOB} ({GENERATING})", f"sum {OF_JOB} ({ENGINE_SECONDS})")),
            },
            by=("namespace", "rljob", "state"),
            units={"engine time used": "percentunit", "reward": "sci", "tokens/s": "short"},
            width=16,
            link=("rljob", "/d/rljob-job?var-namespace=${__data.fields.namespace}&var-rljob=${__value.text}"),
        ),
        rows(
            "Firing alerts",
            "The annotation runbook_url of each alert names the page with the remedy.",
            {"": Query(f"max by (alertname, severity, namespace, rljob) ({ALERTS})")},
            by=("alertname", "severity", "namespace", "rljob"),
            width=8,
        ),
    )
    page = section(
        page,
        "Use of the accelerators",
        graph(
            "Tokens per second",
            "Generated tokens of each job. A line that falls to 0 is a job that makes no progress.",
            Query(f"sum {OF_JOB} ({TOKENS})", NAME),
        ),
        graph(
            "Steps per hour",
            "Trained batches of each job.",
            Query(f"3600 * sum {OF_JOB} ({rate('rljob_policy_version', JOBS)})", NAME),
        ),
        graph(
            "Engine time by activity",
            "Number of engines by what they do. waiting: there is no request: raise maxStaleness, or use fewer "
            "engines. paused: weights are updated. dead: the server starts or crashed.",
            Query(f"sum by (activity) ({ENGINE_SECONDS})", "{{activity}}"),
            stacked=True,
        ),
        graph(
            "Engines that wait",
            "Share of each job's engine time without a request.",
            Query(
                over(
                    f"sum {OF_JOB} ({WAITING})",
                    f"sum {OF_JOB} ({ENGINE_SECONDS})",
                ),
                NAME,
            ),
            share=True,
        ),
        graph(
            "Ends of samples",
            "Samples per second by their end, over all jobs. filtered: all rewards of a group are equal, so nothing "
            "can be learned from it. failed: generation or reward failed; the job's dashboard has the details.",
            Query(f"sum({rate('rljob_samples_trained_total', JOBS)})", "trained"),
            Query(f"sum by (reason) ({rate('rljob_samples_discarded_total', JOBS)})", "{{reason}}"),
            unit="ops",
            stacked=True,
        ),
        graph(
            "Reward",
            "Mean reward of each job's last step. The scale is the job's own.",
            Query(f"max {OF_JOB} (rljob_step_reward_mean{{{JOBS}}})", NAME),
        ),
    )
    return page.build()
