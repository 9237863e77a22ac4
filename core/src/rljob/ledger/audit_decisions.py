"""Rules about the decisions of user-written group filters, in the form of audit_rules."""

from __future__ import annotations

from rljob.ledger.audit_rules import AuditRule, Property
from rljob.ledger.queries import MEMBERS_OF

_FUNCTION = "json_extract(f.value, '$.function')"
_SURVIVORS = (
    "(SELECT json_group_array(id) FROM (SELECT s.id FROM samples s WHERE s.reward IS NOT NULL"
    f" AND s.reason != 'the group has enough members' AND s.member >= :greedy AND {MEMBERS_OF} ORDER BY s.member))"
)
"""JSON list of the scored members of group g that its closing did not end."""

DECISIONS = (
    Property(
        "groups have the decisions of user-written filters",
        "SELECT COUNT(*) FROM decisions",
        (
            AuditRule(
                "SELECT 'group ' || e.id FROM ends e JOIN json_each(:filters) f ON f.key = e.task"
                f" WHERE e.kind = 'train' AND trained + batched > 0 AND {_FUNCTION} IS NOT NULL AND NOT EXISTS"
                " (SELECT 1 FROM decisions d WHERE d.group_number = e.number AND d.accepted = 1)",
                "it is in a batch, but the user-written filter of its task did not accept it",
            ),
            AuditRule(
                "SELECT 'group number ' || d.group_number FROM decisions d LEFT JOIN groups g"
                " ON g.number = d.group_number LEFT JOIN json_each(:filters) f ON f.key = g.task"
                f" WHERE g.kind IS NOT 'train' OR {_FUNCTION} IS NULL",
                "a user-written filter decided about it, but it does not exist, or its task has no such filter",
            ),
            AuditRule(
                "SELECT 'group number ' || group_number FROM decisions"
                " WHERE accepted NOT IN (0, 1) OR (accepted = 1 AND reason != '')",
                "its decision is neither an acceptance nor a rejection nor a failure of the filter",
            ),
            AuditRule(
                "SELECT 'group ' || g.id FROM decisions d JOIN groups g ON g.number = d.group_number"
                f" WHERE d.survivors != {_SURVIVORS} OR json_array_length(d.survivors) != :members",
                "its user-written filter decided about the rewards of other members",
            ),
            AuditRule(
                "SELECT 'group ' || e.id FROM decisions d JOIN ends e ON e.number = d.group_number WHERE"
                " CASE WHEN d.accepted = 1 THEN filtered > 0 WHEN d.reason = '' THEN filtered != :members + :greedy"
                " ELSE (SELECT COUNT(*) FROM samples s JOIN groups g ON g.number = e.number"
                f" WHERE {MEMBERS_OF} AND s.state = 'failed' AND s.reason = d.reason) != :members + :greedy END",
                "its samples ended otherwise than its user-written filter decided",
            ),
            AuditRule(
                "SELECT 'group number ' || group_number FROM decisions d WHERE reason != '' AND NOT EXISTS"
                " (SELECT 1 FROM failures WHERE sample_number = find_number(json_extract(d.survivors, '$[0]')))",
                "its user-written filter failed, but no failure is recorded",
            ),
            AuditRule(
                "SELECT 'sample ' || s.id FROM failures n JOIN samples s ON s.number = n.sample_number"
                " WHERE s.reward IS NOT NULL AND NOT EXISTS (SELECT 1 FROM decisions d"
                " WHERE d.group_number = s.group_number AND d.reason = s.reason)",
                "it failed after it was scored, but its user-written filter did not fail",
            ),
        ),
    ),
)
