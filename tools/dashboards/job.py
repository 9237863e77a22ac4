"""The dashboard of one job: is it well, does it learn, what limits its speed, where do samples get lost."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.panels import (
    GREEN,
    ORANGE,
    RED,
    Query,
    board,
    graph,
    histogram,
    number,
    over,
    quantiles,
    rate,
    section,
    signed,
    variable,
)

JOB = 'namespace="$namespace", rljob="$rljob"'
PAGES = "docs/troubleshooting.md of rljob, section"


EVENTS = (
    ("rejected", "Rejected samples", "Samples per second that ended as filtered or failed, by reason."),
    ("evicted", "Evicted samples", "Samples per second that no batch needed, or that became too old, by reason."),
    ("aborted", "Aborted requests", "Requests per second that engines had to end, by reason."),
    (
        "requeued",
        "Continued requests and samples",
        "Requests per second that another engine continues, and samples that another lease continues, by reason.",
    ),
)
"""Event of rljob_events_total, title and text of its panel."""


def _rate(metric: str, labels: str = "") -> str:
    return rate(metric, f"{JOB}{labels}")


def _by_role(metric: str) -> str:
    return f"sum by (rljob_role) ({_rate(metric)})"


def _reasons(event: str) -> Query:
    """Return the query of an event's reasons that occurred, or of "none"."""
    counted = _rate("rljob_events_total", f', event="{event}"')
    return Query(
        f'sum by (reason) ({counted}) > 0 or on() label_replace(vector(0), "reason", "none", "", "")', "{{reason}}"
    )


def _last(metric: str) -> str:
    return f"max({metric}{{{JOB}}})"


def dashboard() -> Dashboard:
    """Return the dashboard."""
    page = board(
        "RLJobs: one job",
        "rljob-job",
        "One RLJob, from its coordinator and its services. `rljob status -n NAMESPACE NAME` shows the same in words.",
        [
            variable("namespace", "Namespace", "label_values(rljob_run_state, namespace)"),
            variable("rljob", "Job", 'label_values(rljob_run_state{namespace="$namespace"}, rljob)'),
            variable(
                "metric",
                "Trainer metrics",
                f'label_values({{__name__=~"rljob_step_trainer_.+", {JOB}}}, __name__)',
                several=True,
            ),
        ],
    )
    page = section(
        page,
        "Is it well?",
        number(
            "State",
            "State of the run, as in status.run.state of the RLJob.",
            Query(f"rljob_run_state{{{JOB}}} == 1", "{{state}}"),
            named=True,
        ),
        number("Step", "Trained batches.", Query(_last("rljob_policy_version")), decimals=0),
        number("Of", "Batches of the whole run: training.steps.", Query(_last("rljob_training_steps")), decimals=0),
        number(
            "Time left",
            "Remaining steps at the speed of the last 15 minutes.",
            Query(
                f"({_last('rljob_training_steps')} - {_last('rljob_policy_version')}) / "
                f"clamp_min(max(rate(rljob_policy_version{{{JOB}}}[15m])), 1e-9)"
            ),
            unit="s",
            decimals=0,
        ),
        number(
            "Steps in 15 minutes",
            f"0: the run makes no progress. {PAGES} The run makes no progress.",
            Query(f"max(increase(rljob_policy_version{{{JOB}}}[15m]))"),
            decimals=0,
            steps=((None, RED), (1, GREEN)),
        ),
        number(
            "Engines",
            "Engines connected to the coordinator.",
            Query(f"sum(rljob_engines{{{JOB}}})"),
            steps=((None, RED), (1, GREEN)),
        ),
        number(
            "Trainer starts",
            "Trainer processes since the start of the run. More than 1: it was restarted; status.roles[].lastExit of "
            "the RLJob has the reason.",
            Query(_last("rljob_trainer_incarnation")),
            steps=((None, GREEN), (2, ORANGE)),
        ),
        number(
            "Engine crashes",
            f"Engine servers that crashed since the coordinator started. {PAGES} The engine crashes.",
            Query(f"sum(rljob_engine_crashes_total{{{JOB}}})"),
            steps=((None, GREEN), (1, ORANGE), (5, RED)),
        ),
    )
    page = section(
        page,
        "Does it learn?",
        graph(
            "Reward",
            f"Mean reward of each step. {PAGES} The reward does not rise.",
            Query(_last("rljob_step_reward_mean"), "reward"),
            width=6,
        ),
        graph(
            "Held-out accuracy",
            "Accuracy and pass@k on held-out problems, newest evaluation.",
            Query(f"max by (task) (rljob_accuracy{{{JOB}}})", "{{task}} accuracy"),
            Query(f"max by (task, k) (rljob_pass_at{{{JOB}}})", "{{task}} pass@{{k}}"),
            share=True,
            width=6,
        ),
        graph(
            "Does training prefer short answers?",
            "Mean length of trained answers over that of all scored ones, and the p-value of equal lengths "
            "(Kolmogorov-Smirnov), since the start of the run. A ratio below 1 with p below 0.01: deadlines, redundant "
            "members or filters prefer short answers. Answers that were cut are in neither; their share is beside. "
            "docs/monitoring.md of rljob has the details.",
            Query(_last("rljob_step_response_length_trained_over_scored"), "trained over scored"),
            Query(_last("rljob_step_response_length_trained_ks_p"), "p-value"),
            Query(_last("rljob_step_response_length_cut_share"), "cut"),
            width=6,
        ),
        signed(
            graph(
                "Metrics of the trainer",
                "The metrics chosen at the top of the page (docs/algorithms.md of rljob lists them). grad_norm that "
                "grows, or kl_k3 far above 0.01 (engine and trainer disagree), precede a collapse.",
                Query(
                    f'max by (__name__) ({{__name__=~"$metric", __name__=~"rljob_step_trainer_.+", {JOB}}})',
                    "{{__name__}}",
                ),
                width=6,
            )
        ),
    )
    page = section(
        page,
        "What limits the speed?",
        graph(
            "Tokens per second",
            "Tokens that the engines generate.",
            Query(f"sum({_rate('rljob_generated_tokens_total')})", "generated"),
        ),
        graph(
            "Engine time by activity",
            "Engines by what they do. Much waiting: the trainer limits the run. Little waiting and few steps: the "
            f"engines do. Much paused: weight updates. {PAGES} The run is slow.",
            Query(f"sum by (activity) ({_rate('rljob_engine_seconds_total')})", "{{activity}}"),
            stacked=True,
        ),
        graph(
            "Steps per hour",
            "Trained batches.",
            Query(f"3600 * max({_rate('rljob_policy_version')})", "steps"),
        ),
        graph(
            "Samples in progress",
            "unleased: no runner took them: more runners. waiting: for an engine. generating: at an engine. "
            "scoring: at a reward: more replicas of it.",
            Query(f"sum by (state) (rljob_samples{{{JOB}}})", "{{state}}"),
            stacked=True,
        ),
        graph(
            "Groups in no batch yet",
            "complete: scored, and waiting for the trainer.",
            Query(f"sum by (state) (rljob_groups{{{JOB}}})", "{{state}}"),
            stacked=True,
        ),
        graph(
            "Requests sent to their prefix",
            "Share of the requests that went to the engine with their prefix in its cache, since the coordinator "
            "started: members to the engine of their group, next turns to the engine of the turn before. The other "
            "prompts are computed again, because that engine was lost or had no free slot.",
            Query(_last("rljob_step_dispatch_members_at_home"), "members"),
            Query(_last("rljob_step_dispatch_turns_at_home"), "next turns"),
            share=True,
        ),
        graph(
            "Weight update of an engine",
            "Mean seconds of the updates that ended in the last step, and of the pauses in them, in which the engine "
            "does not generate.",
            Query(_last("rljob_step_weights_update_seconds"), "update"),
            Query(_last("rljob_step_weights_pause_seconds"), "pause"),
            unit="s",
        ),
        graph(
            "Staleness",
            "Policy versions between the generation of a sample and its training; training.maxStaleness is the bound.",
            Query(_last("rljob_step_staleness_mean"), "mean"),
            Query(_last("rljob_step_staleness_max"), "largest"),
        ),
        histogram(
            "Trained samples by staleness",
            "Samples per second by their staleness at their batch. A cell has the samples up to its label and "
            "above the label below it.",
            "rljob_trained_staleness",
            JOB,
        ),
    )
    page = section(
        page,
        "Where do samples get lost?",
        graph(
            "Ends of samples",
            "Samples per second by their end. filtered: all rewards of the group are equal. expired: older than "
            "maxStaleness. failed: generation or reward failed; `rljob samples` has the reasons.",
            Query(f"sum({_rate('rljob_samples_trained_total')})", "trained"),
            Query(f"sum by (reason) ({_rate('rljob_samples_discarded_total')})", "{{reason}}"),
            unit="ops",
            stacked=True,
        ),
        graph(
            "Failures of rewards and environments",
            "Share of the samples whose reward failed, timeouts included, and of the steps of environments that "
            "failed.",
            Query(
                over(
                    _by_role("rljob_reward_failures_total"),
                    _by_role("rljob_reward_samples_total"),
                ),
                "{{rljob_role}}",
            ),
            Query(
                over(
                    _by_role("rljob_environment_failures_total"),
                    _by_role("rljob_environment_steps_total"),
                ),
                "{{rljob_role}}",
            ),
            share=True,
        ),
        graph(
            "Rejected messages and connections",
            "Messages with a bad token or an old incarnation, and connections above the limits, per second. A few "
            "after a restart of the trainer are normal.",
            Query(f"sum({_rate('rljob_rejected_messages_total')}) or vector(0)", "messages"),
            Query(f"sum({_rate('rljob_refused_connections_total')}) or vector(0)", "connections"),
            unit="ops",
        ),
    )
    page = section(
        page,
        "Why are samples and requests lost?",
        *(
            graph(
                title,
                f"{text} docs/monitoring.md of rljob has the reasons.",
                _reasons(event),
                unit="ops",
                width=6,
                stacked=True,
            )
            for event, title, text in EVENTS
        ),
    )
    page = section(
        page,
        "Rewards and environments",
        graph(
            "Scored samples",
            "Samples per second that each reward answers.",
            Query(_by_role("rljob_reward_samples_total"), "{{rljob_role}}"),
            unit="ops",
        ),
        graph(
            "Time of a sample in its reward",
            "In a worker, without queueing.",
            *quantiles("rljob_reward_seconds", JOB),
            unit="s",
        ),
        graph(
            "Samples in rewards",
            "Samples that workers have, and those that wait for one.",
            Query(f"sum by (rljob_role) (rljob_reward_samples_in_flight{{{JOB}}})", "{{rljob_role}} in flight"),
            Query(f"sum by (rljob_role) (rljob_reward_queued_samples{{{JOB}}})", "{{rljob_role}} waiting"),
        ),
        graph(
            "Trouble of rewards",
            "Samples without a score by kind of error, and crashed workers, per second.",
            Query(
                f"sum by (rljob_role, kind) ({_rate('rljob_reward_errors_total')})",
                "{{rljob_role}} {{kind}}",
            ),
            Query(_by_role("rljob_reward_worker_crashes_total"), "{{rljob_role}} crashed workers"),
            unit="ops",
        ),
        graph(
            "Sessions of environments",
            "Open episodes on each pod. Pods with many sessions are slow: more replicas.",
            Query(f"sum by (rljob_role, pod) (rljob_environment_sessions{{{JOB}}})", "{{rljob_role}} {{pod}}"),
        ),
        graph(
            "Steps of environments",
            "Steps per second.",
            Query(_by_role("rljob_environment_steps_total"), "{{rljob_role}}"),
            unit="ops",
        ),
        graph(
            "Trouble of environments",
            "Timeouts, and sessions removed because no runner used them, per second.",
            Query(_by_role("rljob_environment_timeouts_total"), "{{rljob_role}} timeouts"),
            Query(_by_role("rljob_environment_expired_sessions_total"), "{{rljob_role}} expired"),
            unit="ops",
        ),
    )
    return page.build()
