"""Rules about generation, scores, publications and evaluations, in the form of audit_rules."""

from __future__ import annotations

from rljob.ledger.audit_rules import AuditRule, Property
from rljob.ledger.queries import MEMBERS_OF
from rljob.ledger.sample_numbers import MEMBER_BITS
from rljob.ledger.states import OPEN, quoted

_FILTERED_GROUPS = "FROM ends e LEFT JOIN json_each(:filters) f ON f.key = e.task WHERE e.kind = 'train'"
_CONSTANT = "COALESCE(json_extract(f.value, '$.kind') = 'nonconstant', 0) AND lowest = highest"
_LEAST = "COALESCE(json_extract(f.value, '$.minMean'), -1e300)"
_MOST = "COALESCE(json_extract(f.value, '$.maxMean'), 1e300)"
_ROUNDING = "1e-9 * (1 + ABS(mean))"
_DECIDED = "EXISTS (SELECT 1 FROM decisions d WHERE d.group_number = e.number AND d.accepted = 0 AND d.reason = '')"

_COUNTED_STATES = (
    "SELECT DISTINCT state FROM samples WHERE state IN ('trained', 'baseline', 'filtered', 'surplus', 'expired',"
    " 'failed')"
)

RESULTS = (
    Property(
        "no trained sample is older than α",
        "SELECT COUNT(*) FROM samples WHERE step IS NOT NULL",
        (
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE step IS NOT NULL"
                " AND (min_version IS NULL OR step - min_version > :alpha)",
                "its oldest token exceeds the staleness bound of its batch",
            ),
            AuditRule(
                "SELECT 'sample ' || s.id FROM samples s JOIN groups g ON g.number = s.group_number"
                " WHERE g.kind = 'train' AND (s.min_version > s.max_version OR (s.min_version IS NULL) !="
                " (NULLIF(s.max_version, -1) IS NULL)"
                " OR (s.response_tokens IS NULL AND s.min_version IS NOT NULL)"
                " OR s.max_version > COALESCE(s.step, :version) OR s.min_version < g.version)",
                "its tokens have versions that did not exist then",
            ),
            AuditRule(
                "SELECT 'sample ' || s.id FROM samples s JOIN groups g ON g.number = s.group_number"
                " WHERE g.kind = 'evaluation' AND (s.min_version != g.version OR s.max_version != g.version"
                " OR (s.state = 'evaluated' AND (s.min_version IS NULL OR s.max_version IS NULL)))",
                "its tokens do not have the evaluated version",
            ),
        ),
    ),
    Property(
        "groups are filtered as the manifest sets",
        "SELECT COUNT(*) FROM ends WHERE kind = 'train' AND trained + batched + filtered > 0",
        (
            AuditRule(
                f"SELECT 'group ' || e.id {_FILTERED_GROUPS} AND trained + batched > 0 AND"
                f" (({_CONSTANT}) OR mean < {_LEAST} - {_ROUNDING} OR mean > {_MOST} + {_ROUNDING})",
                "it is in a batch, but the groupFilter of its task rejects it",
            ),
            AuditRule(
                f"SELECT 'group ' || e.id {_FILTERED_GROUPS} AND filtered > 0 AND (scored < :members + :greedy OR NOT"
                f" (({_CONSTANT}) OR mean < {_LEAST} + {_ROUNDING} OR mean > {_MOST} - {_ROUNDING} OR {_DECIDED}))",
                "it was filtered, but the groupFilter of its task accepts it",
            ),
        ),
    ),
    Property(
        "rewards and advantages are finite, and agree",
        "SELECT COUNT(*) FROM samples WHERE reward IS NOT NULL",
        (
            AuditRule(
                "SELECT 'sample ' || id FROM samples"
                " WHERE (reward IS NULL AND state IN ('scored', 'batched', 'trained', 'baseline', 'evaluated'))"
                " OR reward NOT BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308",
                "its reward is missing or not finite",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE (reward IS NULL) != (turn_rewards IS NULL)"
                " OR (reward IS NULL) != (metrics IS NULL) OR (reward IS NULL) != (text_segment IS NULL)"
                " OR (reward IS NULL) != (text_position IS NULL) OR (reward IS NULL) != (text_length IS NULL)"
                " OR (state = 'admitted' AND reward IS NOT NULL)",
                "reward, turn rewards, metrics and text were not written together",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE reward IS NOT NULL AND NOT add_up(turn_rewards, reward)",
                "its reward is not the sum of the rewards of its turns",
            ),
            AuditRule(
                "SELECT 'sample ' || c.sample FROM completions c JOIN samples s ON s.number = c.sample_number"
                " WHERE c.attempt >= s.attempt AND s.turn_rewards IS NOT NULL GROUP BY c.sample_number"
                " HAVING COUNT(DISTINCT c.turn || ':' || c.branch) != IIF(json_valid(s.turn_rewards),"
                " json_array_length(s.turn_rewards), -1)",
                "its number of turn rewards differs from its number of turns",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE turn_states IS NOT NULL AND (turn_rewards IS NULL OR"
                " IIF(json_valid(turn_states), json_array_length(turn_states), -1) !="
                " IIF(json_valid(turn_rewards), json_array_length(turn_rewards), -2))",
                "its number of states differs from its number of turns",
            ),
            AuditRule(
                "SELECT 'sample ' || s.id FROM samples s JOIN groups g ON g.number = s.group_number"
                " WHERE g.kind = 'train' AND s.reward IS NOT NULL AND (SELECT json_group_array(role) FROM (SELECT role"
                " FROM model_logprobs m WHERE m.sample_number = s.number ORDER BY role)) IS NOT"
                " (SELECT value FROM json_each(:roles) r WHERE r.key = g.task)",
                "it has a reward, but not the log-probabilities of the models of frozen pools",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE advantage IS NOT NULL AND (step IS NULL OR advantage"
                " NOT BETWEEN -3.4028235677973366e38 AND 3.4028235677973366e38)",
                "it has an advantage without a batch, or an advantage that is not finite",
            ),
            AuditRule(
                "SELECT 'batch ' || step FROM samples WHERE step IS NOT NULL GROUP BY step"
                " HAVING COUNT(advantage) NOT IN (0, COUNT(*))",
                "only some of its samples have an advantage",
            ),
            AuditRule(
                "SELECT 'sample ' || m.id FROM (SELECT *, SUM(away * away) OVER (PARTITION BY group_number) AS squares"
                " FROM (SELECT id, group_number, advantage, reward, reward - AVG(reward) OVER own AS away,"
                " COUNT(*) OVER own AS members FROM samples WHERE step IS NOT NULL AND advantage IS NOT NULL"
                " WINDOW own AS (PARTITION BY group_number))) m LEFT JOIN samples b ON :advantage = 'remax'"
                f" AND b.number = m.group_number << {MEMBER_BITS} WHERE ABS(m.advantage - CASE :advantage"
                " WHEN 'group_centered' THEN away WHEN 'remax' THEN m.reward - b.reward"
                " WHEN 'group_normalized' THEN IIF(members = 1, m.reward, away /"
                " (root(squares / (members - 1)) + 1e-6))"
                " ELSE m.advantage END) > 1e-5 + 1e-5 * ABS(m.advantage) + 1e-9 * ABS(m.reward)",
                "its advantage differs from the one recomputed from the rewards of its group",
            ),
        ),
        note="SELECT IIF(:advantage IN ('group_centered', 'group_normalized', 'remax'), NULL,"
        " 'advantages not recomputed: the advantage is ' || :advantage)",
    ),
    Property(
        "engines served what was published",
        "SELECT COUNT(*) FROM served",
        (
            AuditRule(
                "SELECT 'version ' || v.step || ' on ' || v.engine FROM served v LEFT JOIN publications p"
                " ON p.lineage = v.lineage AND p.step = v.step WHERE p.digest IS NOT v.digest",
                "the digest that the engine acknowledged differs from the published digest",
            ),
            AuditRule(
                "SELECT 'version ' || step || ' of lineage ' || lineage FROM (SELECT lineage, step, incarnation,"
                " LAG(incarnation, 1, 0) OVER (ORDER BY lineage, step) AS before FROM publications)"
                " WHERE incarnation < before",
                "a superseded trainer published it",
            ),
            AuditRule(
                "SELECT 'version ' || p.step || ' of lineage ' || p.lineage FROM publications p"
                " JOIN incarnations i ON i.incarnation = p.incarnation WHERE p.step < i.step OR (p.step > i.step AND"
                " NOT EXISTS (SELECT 1 FROM applied a WHERE a.step = p.step - 1 AND a.incarnation = p.incarnation))",
                "a trainer that never held it published it",
            ),
            AuditRule(
                "SELECT 'lineage ' || lineage FROM (SELECT lineage, MIN(step) AS first, LAG(lineage, 1, -1) OVER"
                " (ORDER BY lineage) AS before, LAG(MAX(step)) OVER (ORDER BY lineage) AS last FROM publications"
                " GROUP BY lineage) WHERE lineage != before + 1 OR first != COALESCE(last, first)",
                "it does not start where the previous lineage ended",
            ),
            AuditRule(
                "SELECT 'lineage ' || p.lineage FROM (SELECT lineage, MIN(step) AS step, incarnation FROM publications"
                " WHERE lineage > 0 GROUP BY lineage) p JOIN incarnations i ON i.incarnation = p.incarnation"
                " WHERE p.step <= i.step",
                "the trainer that began it had loaded this version, not computed it again",
            ),
        ),
    ),
    Property(
        "turns have no gaps and token counts agree",
        "SELECT COUNT(*) FROM completions",
        (
            AuditRule(
                "SELECT 'sample ' || c.sample FROM completions c JOIN samples s ON s.number = c.sample_number"
                " WHERE c.attempt >= s.attempt GROUP BY c.sample_number, c.branch"
                " HAVING (c.branch = '' AND MIN(c.turn) != 0)"
                " OR MAX(c.turn) - MIN(c.turn) + 1 != COUNT(DISTINCT c.turn)",
                "one of its turns is missing",
            ),
            AuditRule(
                "SELECT 'turn ' || c.turn || ' of ' || c.sample || IIF(c.branch = '', '', ', branch ' || c.branch)"
                " FROM completions c JOIN samples s ON s.number = c.sample_number"
                " WHERE c.attempt >= s.attempt GROUP BY c.sample_number, c.turn, c.branch"
                " HAVING MIN(c.attempt) != MIN(s.attempt)"
                " OR MAX(c.attempt) - MIN(c.attempt) + 1 != COUNT(*)"
                " OR COALESCE(MIN(CASE WHEN c.finish != 'abort' THEN c.attempt END), MAX(c.attempt)) != MAX(c.attempt)",
                "one of its completions is missing, or follows the completion that finished the turn",
            ),
            AuditRule(
                "SELECT 'completion of ' || sample FROM completions WHERE finish NOT IN ('stop', 'length', 'abort')"
                " OR tokens < 0 OR turn < 0 OR attempt < 0",
                "its finish, tokens, turn or attempt is not valid",
            ),
            AuditRule(
                "SELECT 'sample ' || s.id FROM samples s LEFT JOIN (SELECT c.sample_number AS sample,"
                " SUM(c.tokens) AS tokens FROM completions c JOIN samples o ON o.number = c.sample_number"
                " AND c.attempt >= o.attempt GROUP BY c.sample_number) t"
                " ON t.sample = s.number WHERE t.tokens IS NOT s.response_tokens",
                "its number of tokens differs from the sum over its completions",
            ),
            AuditRule(
                "SELECT 'sample ' || s.id FROM samples s LEFT JOIN (SELECT c.sample_number AS sample,"
                " MAX(c.turn) AS last FROM completions c JOIN samples o ON o.number = c.sample_number"
                " AND c.attempt >= o.attempt GROUP BY c.sample_number) t"
                " ON t.sample = s.number WHERE (s.total_tokens IS NULL) != (t.last IS NULL)"
                " OR s.total_tokens < s.prompt_tokens + s.response_tokens"
                " OR (t.last = 0 AND s.sequences IS NULL AND s.total_tokens != s.prompt_tokens + s.response_tokens)"
                " OR (s.sequences IS NOT NULL AND s.total_tokens !="
                " IIF(json_valid(s.sequences), (SELECT TOTAL(value) FROM json_each(s.sequences)), -1))",
                "its length differs from the sum of prompt, observations and responses",
            ),
            AuditRule(
                "SELECT 'turn ' || turn || ' of ' || sample FROM (SELECT c.*, IIF(s.sequences IS NULL,"
                " s.total_tokens, c.total_tokens) AS total, s.min_version AS"
                " lowest, s.max_version AS highest, s.finish AS ended, LEAD(c.number) OVER own AS next,"
                " MAX(c.max_version) OVER all_of AS newest FROM completions c JOIN samples s"
                " ON s.number = c.sample_number WHERE c.attempt >= s.attempt WINDOW all_of AS (PARTITION BY"
                " c.sample_number), own AS (PARTITION BY c.sample_number ORDER BY c.number)) WHERE next IS"
                " NULL AND (total IS NOT total_tokens OR lowest IS NOT min_version OR highest IS NOT newest"
                " OR ended IS NOT finish)",
                "its length, versions or finish differ from those of its sample",
            ),
            AuditRule(
                "SELECT 'sample ' || id FROM samples WHERE reward IS NOT NULL AND (response_tokens IS NULL"
                " OR prompt_tokens IS NULL OR prompt_tokens < 0 OR total_tokens IS NULL OR finish IS NULL"
                " OR min_version IS NULL OR dispatched IS NOT NULL)",
                "it was scored, but its generation is not complete",
            ),
        ),
    ),
    Property(
        "evaluations have the problems they claim",
        "SELECT COUNT(*) FROM evaluations",
        (
            AuditRule(
                "SELECT 'version ' || e.version || ', task ' || e.task FROM evaluations e LEFT JOIN (SELECT g.version"
                " AS version, g.task AS task, COUNT(DISTINCT g.id) AS problems, TOTAL(s.state = 'failed') AS failed,"
                " TOTAL(s.state IN ('admitted', 'expired')) AS open, AVG(COALESCE(s.reward, 0)) AS mean,"
                " AVG(COALESCE(s.reward >= :pass_reward, 0)) AS accuracy FROM groups g"
                f" JOIN samples s ON {MEMBERS_OF}"
                " WHERE g.kind = 'evaluation' GROUP BY g.version, g.task) f ON f.version = e.version AND"
                " f.task = e.task WHERE f.problems IS NOT e.problems OR f.failed != e.failed OR f.open > 0"
                " OR e.samples != :answers"
                " OR ABS(f.mean - e.mean_reward) > 1e-9 * (1 + ABS(f.mean)) OR ABS(f.accuracy - e.accuracy) > 1e-9",
                "its problems, failures, mean reward or accuracy differ from its samples",
            ),
            AuditRule(
                "SELECT 'version ' || version || ', task ' || task FROM evaluations e WHERE NOT pass_rates_agree("
                "pass_at, (SELECT json_group_array(passed) FROM (SELECT CAST(TOTAL(s.reward >= :pass_reward) AS"
                f" INTEGER) AS passed FROM groups g JOIN samples s ON {MEMBERS_OF} WHERE g.kind = 'evaluation'"
                " AND g.version = e.version AND g.task = e.task GROUP BY g.id)), :answers, :pass_at)",
                "its pass@k differs from the one recomputed from its samples",
            ),
            AuditRule(
                "SELECT DISTINCT 'version ' || g.version || ', task ' || g.task FROM groups g WHERE"
                " g.kind = 'evaluation' AND NOT EXISTS (SELECT 1 FROM evaluations e WHERE e.version = g.version"
                " AND e.task = g.task) AND NOT EXISTS (SELECT 1 FROM ends n WHERE n.kind = 'evaluation'"
                " AND n.version = g.version AND (n.waiting > 0 OR n.expired > 0))",
                "all its problems ended, but it has no result",
            ),
            AuditRule(
                "SELECT 'version ' || version FROM (SELECT DISTINCT version FROM groups WHERE kind = 'evaluation')"
                " WHERE version > :version",
                "it was evaluated, but the version does not exist",
            ),
            AuditRule(
                "SELECT 'version ' || value FROM json_each(:evaluated) WHERE :finished"
                " AND NOT EXISTS (SELECT 1 FROM evaluations WHERE version = value)",
                "the run is done, but this version was not evaluated",
            ),
        ),
    ),
    Property(
        "the records for a restart are valid",
        "SELECT (SELECT COUNT(*) FROM meta) + (SELECT COUNT(*) FROM failures) + (SELECT COUNT(*) FROM ended)",
        (
            AuditRule(
                "SELECT key FROM meta WHERE key IN ('coordinator_starts', 'verified_incarnation')"
                " AND (value != CAST(CAST(value AS INTEGER) AS TEXT) OR CAST(value AS INTEGER) < 0)",
                "its value is not a count",
            ),
            AuditRule(
                "SELECT 'coordinator_starts' WHERE :version > 0"
                " AND COALESCE((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'coordinator_starts'), 0) < 1",
                "batches were applied, but no coordinator start is recorded",
            ),
            AuditRule(
                "SELECT key FROM meta WHERE key = 'verified_incarnation'"
                " AND CAST(value AS INTEGER) > (SELECT COALESCE(MAX(incarnation), 0) FROM incarnations)",
                "this incarnation does not exist",
            ),
            AuditRule(
                "SELECT key FROM meta WHERE key = 'finished' AND CAST(value AS REAL) <= 0", "its value is not a time"
            ),
            AuditRule(
                f"SELECT e.state FROM (SELECT state FROM ended UNION {_COUNTED_STATES}) e"
                " LEFT JOIN ended n ON n.state = e.state LEFT JOIN (SELECT s.state AS state, COUNT(*) AS samples"
                " FROM samples s WHERE s.number >= 0 GROUP BY s.state) c ON c.state = e.state"
                " WHERE COALESCE(n.samples, 0) != COALESCE(c.samples, 0)",
                "the count of samples with this end differs from the number of such samples",
            ),
            AuditRule(
                "SELECT 'task ' || task FROM mixture m WHERE rows != (SELECT COALESCE(MAX(g.row) + 1, 0) FROM groups g"
                " WHERE g.kind = 'train' AND g.task = m.task)",
                "the count of its started rows differs from its groups",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM groups WHERE dispatched NOT BETWEEN version AND"
                " IIF(kind = 'train', :version, version)",
                "its first request went to an engine of a version that did not exist then",
            ),
            AuditRule(
                "SELECT DISTINCT 'group ' || g.id FROM samples s JOIN groups g ON g.number = s.group_number"
                " WHERE s.min_version IS NOT NULL AND (g.dispatched IS NULL OR"
                " (s.attempt = 0 AND s.min_version < g.dispatched))",
                "a sample has tokens of a version before its first request",
            ),
            AuditRule(
                "SELECT 'group ' || id FROM groups g WHERE open != EXISTS (SELECT 1 FROM samples s"
                f" WHERE {MEMBERS_OF} AND s.state IN ({quoted(OPEN)}))",
                "it is marked as open and has no open sample, or the other way round",
            ),
            AuditRule(
                "SELECT 'dropped_evaluation' WHERE COALESCE((SELECT CAST(value AS INTEGER) FROM meta"
                " WHERE key = 'dropped_evaluation'), -1) != COALESCE((SELECT MAX(version) FROM ends"
                " WHERE kind = 'evaluation' AND expired > 0), -1)",
                "its value is not the last version whose evaluation was dropped",
            ),
            AuditRule(
                "SELECT 'failure ' || f.number FROM failures f LEFT JOIN samples s ON s.number = f.sample_number"
                " WHERE s.state IS NOT 'failed'",
                "its sample did not fail",
            ),
            AuditRule(
                "SELECT 'sample ' || s.id FROM samples s JOIN groups g ON g.number = s.group_number WHERE"
                " s.state = 'failed'"
                " AND NOT EXISTS (SELECT 1 FROM failures f WHERE"
                " f.sample_number BETWEEN s.number - s.member AND s.number - s.member + 4095"
                " AND (g.kind = 'train' OR f.sample_number = s.number))",
                "it failed, but no failure is recorded",
            ),
        ),
    ),
)
