"""Rules about groups, samples and batches, as queries that return the violating rows. Plain data; audit runs them.

Parameters: version (batches applied), finished (0 | 1), steps, groups (of a batch), members (of a trained group),
admitted (members of a group when it starts), greedy (0 | 1: the first of them is a greedy answer), redundant (groups
started beyond the bound), alpha, advantage; answers (to a problem of an evaluation), pass_reward; tasks (names),
pass_at and evaluated (versions to evaluate by the manifest) are JSON lists, filters and roles JSON objects: task →
groupFilter, and task → JSON list of the roles of models of frozen pools. The temporary table ``ends`` has one row for
each group with the number of its samples in each state; ``listed`` has one row for each sample of a batch, and
``held`` one for each completion that the row of a sample lists. ``samples`` is the view that
LedgerReader.prepare_accounts creates.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob.ledger.queries import MEMBERS_OF

ENDS = f"""
CREATE TEMP TABLE ends AS
SELECT g.number AS number, g.id AS id, g.kind AS kind, g.seq AS seq, g.task AS task, g.row AS row, g.version AS version,
    COUNT(s.id) AS samples, MIN(s.member) AS first, MAX(s.member) AS last,
    TOTAL(s.state = 'trained') AS trained, TOTAL(s.state = 'batched') AS batched,
    TOTAL(s.state = 'filtered') AS filtered, TOTAL(s.state = 'surplus') AS surplus,
    TOTAL(s.state = 'baseline') AS baselines,
    TOTAL(s.state = 'expired') AS expired, TOTAL(s.state = 'failed') AS failed,
    TOTAL(s.state = 'expired' OR s.reason LIKE 'not needed by batch %') AS replaced, g.restarts AS restarts,
    TOTAL(s.state = 'evaluated') AS evaluated, TOTAL(s.state IN ('admitted', 'scored')) AS waiting,
    TOTAL(s.reward IS NOT NULL AND s.state = 'filtered') AS scored, COUNT(DISTINCT s.step) AS steps,
    MIN(CASE WHEN s.state IN ('trained', 'batched', 'filtered') AND s.member >= :greedy THEN s.reward END) AS lowest,
    MAX(CASE WHEN s.state IN ('trained', 'batched', 'filtered') AND s.member >= :greedy THEN s.reward END) AS highest,
    AVG(CASE WHEN s.state IN ('trained', 'batched', 'filtered') AND s.member >= :greedy THEN s.reward END) AS mean
FROM groups g LEFT JOIN samples s ON {MEMBERS_OF} GROUP BY g.number
"""
LISTED = """
CREATE TEMP TABLE listed AS
SELECT b.step AS step, CAST(e.key AS INTEGER) AS place, e.value AS sample, find_number(e.value) AS number
FROM batches b, json_each(CASE WHEN json_valid(b.samples) THEN b.samples ELSE '[]' END) e
"""
HELD = """
CREATE TEMP TABLE held AS SELECT j.value AS number, s.number AS sample_number, s.id AS sample
FROM samples s, json_each(CASE WHEN json_valid(s.completions) THEN s.completions ELSE '[]' END) j
"""
PREPARATIONS = (
    "CREATE TEMP VIEW samples AS SELECT * FROM accounts",
    ENDS,
    LISTED,
    "CREATE INDEX temp.listed_by_number ON listed (number)",
    HELD,
    "CREATE INDEX temp.held_by_number ON held (number)",
)


@dataclass(frozen=True)
class AuditRule:
    """A query that returns one name for each violating row, and the problem that all of these rows have."""

    query: str
    problem: str


@dataclass(frozen=True)
class Property:
    """A property of the ledger and its rules.

    ``examined``: query for the number of rows that the rules examine. ``note``: query for a text about what the rules
    do not cover in this run; NULL if they cover everything.
    """

    name: str
    examined: str
    rules: tuple[AuditRule, ...]
    note: str = "SELECT NULL"


_ENDED = "('trained', 'baseline', 'filtered', 'surplus', 'expired', 'failed')"

ACCOUNTS = (
    Property(
        "all references are valid",
        "SELECT (SELECT COUNT(*) FROM samples) + (SELECT COUNT(*) FROM completions) + (SELECT COUNT(*) FROM answers)"
        " + (SELECT COUNT(*) FROM applied)",
        (
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE NOT EXISTS (SELECT 1 FROM groups WHERE number ="
                " group_number)",
                "its group does not exist",
            ),
            AuditRule(
                "SELECT DISTINCT 'completion of ' || sample FROM completions"
                " WHERE NOT EXISTS (SELECT 1 FROM samples WHERE number = sample_number)",
                "its sample does not exist",
            ),
            AuditRule(
                "SELECT DISTINCT 'answer for ' || sample FROM answers"
                " WHERE NOT EXISTS (SELECT 1 FROM samples WHERE number = sample_number)",
                "its sample does not exist",
            ),
            AuditRule(
                "SELECT DISTINCT 'answer for ' || a.sample FROM answers a JOIN samples s ON s.number = a.sample_number"
                " WHERE a.attempt NOT BETWEEN 0 AND s.attempt OR a.number < 0 OR a.finish NOT IN ('stop', 'length')",
                "its attempt, number or finish is not valid",
            ),
            AuditRule(
                "SELECT 'completion of ' || sample FROM completions c WHERE NOT EXISTS (SELECT 1 FROM held h"
                " WHERE h.number = c.number AND h.sample_number = c.sample_number)",
                "its sample does not list it",
            ),
            AuditRule(
                "SELECT 'sample ' || sample FROM held h WHERE NOT EXISTS (SELECT 1 FROM completions c"
                " WHERE c.number = h.number AND c.sample_number = h.sample_number)",
                "it lists a completion that does not exist, or is of another sample",
            ),
            AuditRule(
                "SELECT 'sample ' || MAX(sample) FROM held GROUP BY number HAVING COUNT(*) > 1",
                "it lists a completion twice",
            ),
            AuditRule(
                "SELECT 'sample ' || sample FROM listed l"
                " WHERE NOT EXISTS (SELECT 1 FROM samples s WHERE s.number = l.number)",
                "a batch lists it, but it does not exist",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples s WHERE step IS NOT NULL"
                " AND NOT EXISTS (SELECT 1 FROM batches b WHERE b.step = s.step)",
                "its batch does not exist",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM groups WHERE id != CASE kind WHEN 'train' THEN 'g' || seq"
                " WHEN 'evaluation' THEN 'e' || version || '.' || seq ELSE '' END",
                "its id does not match its kind, version and number",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM groups WHERE task NOT IN (SELECT value FROM json_each(:tasks))",
                "the manifest has no such task",
            ),
            AuditRule(
                "SELECT 'step ' || step || ' of incarnation ' || incarnation FROM applied a"
                " WHERE NOT EXISTS (SELECT 1 FROM batches b WHERE b.step = a.step)"
                " OR NOT EXISTS (SELECT 1 FROM incarnations i WHERE i.incarnation = a.incarnation)",
                "it was applied, but its batch or incarnation does not exist",
            ),
            AuditRule(
                "SELECT 'step ' || step FROM step_metrics m"
                " WHERE NOT EXISTS (SELECT 1 FROM applied a WHERE a.step = m.step)",
                "it has metrics, but was never applied",
            ),
            AuditRule(
                "SELECT 'version ' || step || ' of lineage ' || lineage FROM publications p WHERE step > :version"
                " OR step < 0 OR NOT EXISTS (SELECT 1 FROM incarnations i WHERE i.incarnation = p.incarnation)",
                "it was published, but that version or incarnation does not exist",
            ),
            AuditRule(
                "SELECT 'checkpoint ' || step FROM checkpoints c WHERE step > :version OR step < 0"
                " OR NOT EXISTS (SELECT 1 FROM incarnations i WHERE i.incarnation = c.incarnation)",
                "that version or incarnation does not exist",
            ),
        ),
    ),
    Property(
        "groups are admitted whole, in order",
        "SELECT COUNT(*) FROM groups",
        (
            AuditRule(
                "SELECT 'group ' || id FROM ends WHERE first IS NOT 0 OR last + 1 != samples"
                " OR samples != CASE kind WHEN 'train' THEN :admitted ELSE :answers END",
                "it has too few or too many members, or they are not numbered from 0",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM (SELECT id, seq, LAG(seq, 1, -1) OVER (PARTITION BY kind,"
                " CASE kind WHEN 'train' THEN 0 ELSE version END ORDER BY seq) AS before FROM groups)"
                " WHERE seq != before + 1",
                "the previous group in order of admission is missing",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM (SELECT id, version, LAG(version, 1, 0) OVER (ORDER BY seq) AS before"
                " FROM groups WHERE kind = 'train') WHERE version < before OR version > :version",
                "it was admitted at a version that is lower than that of the previous group, or does not exist",
            ),
            AuditRule(
                "SELECT 'version ' || version FROM (SELECT DISTINCT version, SUM(trained + batched + waiting > 0)"
                " OVER (ORDER BY version) AS started FROM ends WHERE kind = 'train')"
                " WHERE started > (:alpha + version + 1) * :groups + :redundant",
                "more groups were started up to this version than α allows",
            ),
        ),
    ),
    Property(
        "no prompt is lost or started twice",
        "SELECT COUNT(*) FROM groups",
        (
            AuditRule(
                "SELECT 'group ' || id FROM (SELECT id, row, LAG(row, 1, -1) OVER (PARTITION BY kind, task,"
                " CASE kind WHEN 'train' THEN 0 ELSE version END ORDER BY row) AS before FROM groups)"
                " WHERE row > before + 1 OR row < 0",
                "the previous row of its task was never started",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM (SELECT id, LEAD(id) OVER prompt AS again, replaced"
                " FROM ends WHERE kind = 'train' WINDOW prompt AS (PARTITION BY task, row ORDER BY seq))"
                " WHERE again IS NOT NULL AND replaced = 0",
                "its prompt was restarted, but the group was not late",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM (SELECT id, LEAD(id) OVER prompt AS again, replaced"
                " FROM ends WHERE kind = 'train' WINDOW prompt AS (PARTITION BY task, row ORDER BY seq))"
                " WHERE again IS NULL AND replaced > 0",
                "the group was late, but its prompt was not restarted",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM (SELECT id, restarts, ROW_NUMBER() OVER"
                " (PARTITION BY task, row ORDER BY seq) - 1 AS before FROM ends WHERE kind = 'train')"
                " WHERE restarts != before",
                "its number of restarts is not the number of earlier groups of its prompt",
            ),
            AuditRule(
                "SELECT 'group ' || MAX(id) FROM groups WHERE kind = 'evaluation' GROUP BY version, task, row"
                " HAVING COUNT(*) > 1",
                "its problem occurs twice in one evaluation",
            ),
        ),
    ),
    Property(
        "every sample ends exactly once",
        "SELECT COUNT(*) FROM samples",
        (
            AuditRule(
                "SELECT 'sample ' || s.id FROM samples s JOIN groups g ON g.number = s.group_number WHERE NOT"
                " CASE g.kind"
                f" WHEN 'train' THEN s.state IN {_ENDED} OR (NOT :finished AND s.state IN"
                " ('admitted', 'scored', 'batched'))"
                " ELSE s.state IN ('evaluated', 'failed', 'expired') OR (NOT :finished AND s.state = 'admitted') END",
                "its state is not valid for its kind, or it is open after the end of the run",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM ends WHERE kind = 'train' AND CASE"
                " WHEN trained + batched > 0 THEN trained + batched != :members OR trained * batched > 0"
                "  OR samples != trained + batched + baselines + surplus + failed OR baselines != :greedy"
                " WHEN filtered > 0 THEN filtered != :members + :greedy OR samples != filtered + surplus + failed"
                " WHEN expired > 0 THEN samples != expired + surplus + failed"
                " ELSE samples != waiting + surplus + failed END",
                "the ends of its samples are inconsistent",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM ends WHERE kind = 'train' AND waiting > 0 AND waiting < :members + :greedy",
                "some of its samples ended, and too few are left to complete the group",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE state = 'baseline' AND (member != 0 OR NOT :greedy)",
                "it is the baseline of its group, but not a greedy answer",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE (reason != '') !="
                " (state IN ('filtered', 'surplus', 'expired', 'failed'))",
                "it was rejected without a reason, or has a reason but was not rejected",
            ),
        ),
    ),
    Property(
        "no sample is in two batches; samples and batches agree",
        "SELECT COUNT(*) FROM listed",
        (
            AuditRule(
                "SELECT 'sample ' || sample FROM listed GROUP BY sample HAVING COUNT(*) > 1",
                "batches list it more than once",
            ),
            AuditRule(
                "SELECT 'sample ' || s.id FROM listed l JOIN samples s ON s.number = l.number"
                " WHERE s.step IS NOT l.step OR s.state != CASE WHEN l.step < :version THEN 'trained' ELSE 'batched'"
                " END",
                "a batch lists it, but its step or state contradict that",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples s WHERE step IS NOT NULL"
                " AND NOT EXISTS (SELECT 1 FROM listed l WHERE l.number = s.number)",
                "it has the step of a batch, but no batch lists it",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE (step IS NOT NULL) != (state IN ('trained', 'batched'))",
                "it was trained without a batch, or is in a batch but ended otherwise",
            ),
            AuditRule(
                "SELECT 'sample ' || sample FROM (SELECT l.sample AS sample, l.place AS place, ROW_NUMBER() OVER"
                " (PARTITION BY l.step ORDER BY g.seq, s.member) - 1 AS due FROM listed l JOIN samples s"
                " ON s.number = l.number JOIN groups g ON g.number = s.group_number) WHERE place != due",
                "its position in the batch does not follow the order of admission and member",
            ),
            AuditRule(
                "SELECT 'batch ' || b.step FROM batches b WHERE (SELECT COUNT(DISTINCT s.group_number) FROM samples s"
                " WHERE s.step = b.step) != :groups",
                "its number of groups is not training.promptsPerStep",
            ),
            AuditRule("SELECT 'batch ' || step FROM batches WHERE groups != :groups", "it counts other groups"),
            AuditRule(
                "SELECT 'group ' || id FROM ends WHERE steps > 1",
                "its samples are in different batches",
            ),
            AuditRule(
                "SELECT 'batch ' || step FROM (SELECT step, LAG(step, 1, -1) OVER (ORDER BY step) AS before"
                " FROM batches) WHERE step != before + 1 OR step > :version",
                "the previous batch is missing, or was not applied",
            ),
            AuditRule(
                "SELECT 'batch ' || COUNT(*) FROM batches HAVING :finished AND COUNT(*) != :steps",
                "the run is done, but the number of batches differs from the number of steps",
            ),
        ),
    ),
)
