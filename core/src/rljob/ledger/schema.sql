-- The ledger: admissions, decisions and publications of a run. Rows are added and their states advance; none is deleted.
-- A commit writes whole pages: rows of completions are added in order of time, and those of samples change once before a
-- batch. What a sample without a reward has generated follows from its completions.
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY,      -- see rljob.ledger.sample_numbers
    kind TEXT NOT NULL,              -- train | evaluation
    seq INTEGER NOT NULL,            -- order of admission; in an evaluation the order within it
    task TEXT NOT NULL,
    row INTEGER NOT NULL,
    version INTEGER NOT NULL,        -- trainer version at admission; in an evaluation the pinned version
    restarts INTEGER NOT NULL,       -- number of earlier groups of the same prompt
    dispatched INTEGER,              -- version of the engine that got the first request of the group; NULL: none did
    completions INTEGER NOT NULL,    -- number of the newest completion when the group was admitted
    open INTEGER NOT NULL DEFAULT 1, -- whether a sample of the group has not ended
    id TEXT AS (
        CASE WHEN number >= 0 THEN 'g' || number
        ELSE 'e' || (-1 - number >> 28) || '.' || (-1 - number & 268435455) END
    )
);
CREATE TABLE IF NOT EXISTS samples (
    number INTEGER PRIMARY KEY,             -- of its group << 12, + member
    attempt INTEGER NOT NULL DEFAULT 0,     -- first attempt that counts, raised when generated tokens are discarded
    state TEXT NOT NULL DEFAULT 'admitted', -- admitted | scored | batched | trained | baseline | filtered | surplus | expired | failed | evaluated
    reason TEXT NOT NULL DEFAULT '',
    reward REAL,
    turn_rewards TEXT,                      -- JSON list, one number for each turn by branch; the sum is the reward, except for rounding
    turn_states TEXT,                       -- JSON list, a digest for each turn by branch, empty if unknown; NULL: no turn has one
    completions TEXT,                       -- JSON list of numbers; this and the next seven: see rljob.ledger.sample_progress
    prompt_tokens INTEGER,                  -- of the first turn
    response_tokens INTEGER,                -- written by the model, over all turns
    total_tokens INTEGER,                   -- of all sequences: prompt, model and observations
    sequences TEXT,                         -- JSON list of the tokens of each sequence; NULL: there is one
    min_version INTEGER,
    max_version INTEGER,
    finish TEXT,
    dispatched INTEGER,                     -- as that of its group, of the attempts after a discarded one
    metrics TEXT,                           -- of the reward, JSON
    text_segment INTEGER,                   -- of the texts: where the text of the last turn is
    text_position INTEGER,
    text_length INTEGER,
    step INTEGER,                           -- of its batch
    advantage REAL,                         -- used by the trainer; NULL: not reported
    group_number INTEGER AS (number >> 12),
    member INTEGER AS (number & 4095),
    group_id TEXT AS (
        CASE WHEN number >= 0 THEN 'g' || (number >> 12)
        ELSE 'e' || (-1 - (number >> 12) >> 28) || '.' || (-1 - (number >> 12) & 268435455) END
    ),
    id TEXT AS (group_id || '.' || member)
);
CREATE VIEW IF NOT EXISTS scores AS  -- samples with a reward
SELECT number AS sample_number, id AS sample, metrics, text_segment, text_position, text_length
FROM samples WHERE metrics IS NOT NULL;
CREATE TABLE IF NOT EXISTS failures (  -- samples that failed by themselves; the other samples of their groups end with them
    number INTEGER PRIMARY KEY,        -- from 1, in order of time
    sample_number INTEGER NOT NULL UNIQUE REFERENCES samples(number)
);
CREATE INDEX IF NOT EXISTS groups_open ON groups (number) WHERE open = 1;
CREATE INDEX IF NOT EXISTS samples_by_step ON samples (step) WHERE step IS NOT NULL;
CREATE TABLE IF NOT EXISTS ended (   -- number of training samples with each end
    state TEXT PRIMARY KEY,
    samples INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS completions (
    number INTEGER PRIMARY KEY,      -- from 1, in order of time: new rows are in few pages
    sample_number INTEGER NOT NULL REFERENCES samples(number),
    turn INTEGER NOT NULL,
    branch TEXT NOT NULL,            -- see rljob.protocol.branches; empty: the first context of the trajectory
    attempt INTEGER NOT NULL,
    finish TEXT NOT NULL,            -- stop | length | abort (a prefix)
    tokens INTEGER NOT NULL,
    total_tokens INTEGER NOT NULL,   -- of its branch after it: context and response of its turn
    min_version INTEGER,             -- lowest version of a token of the sample so far
    max_version INTEGER NOT NULL,    -- highest version of its tokens; -1: it has none
    engine TEXT NOT NULL,
    digest TEXT NOT NULL,            -- blake3 of the payload record
    segment INTEGER NOT NULL,
    position INTEGER NOT NULL,
    length INTEGER NOT NULL,
    sample TEXT AS (
        CASE WHEN sample_number >= 0 THEN 'g' || (sample_number >> 12)
        ELSE 'e' || (-1 - (sample_number >> 12) >> 28) || '.' || (-1 - (sample_number >> 12) & 268435455) END
        || '.' || (sample_number & 4095)
    )
);
CREATE TABLE IF NOT EXISTS answers (  -- of frozen pools to questions of loops, before the loop gets them
    sample_number INTEGER NOT NULL REFERENCES samples(number),
    attempt INTEGER NOT NULL,        -- that of the sample; answers of an earlier one do not count
    branch TEXT NOT NULL,            -- that asked, see rljob.protocol.branches
    question TEXT NOT NULL,          -- digest of what was asked of which pool, and how
    number INTEGER NOT NULL,         -- of equal questions of the branch, from 0
    turn INTEGER NOT NULL,           -- turns of the branch before it, with those that it continues
    pool TEXT NOT NULL,
    finish TEXT NOT NULL,            -- stop | length
    segment INTEGER NOT NULL,        -- of the texts: where the text of the answer is
    position INTEGER NOT NULL,
    length INTEGER NOT NULL,
    sample TEXT AS (
        CASE WHEN sample_number >= 0 THEN 'g' || (sample_number >> 12)
        ELSE 'e' || (-1 - (sample_number >> 12) >> 28) || '.' || (-1 - (sample_number >> 12) & 268435455) END
        || '.' || (sample_number & 4095)
    ),
    PRIMARY KEY (sample_number, attempt, branch, question, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS model_logprobs (  -- of samples with a reward, from engines of frozen pools
    sample_number INTEGER NOT NULL REFERENCES samples(number),
    role TEXT NOT NULL,              -- reference | teachers[0] | teachers[1] …
    digest TEXT NOT NULL,            -- blake3 of the payload record
    segment INTEGER NOT NULL,
    position INTEGER NOT NULL,
    length INTEGER NOT NULL,
    PRIMARY KEY (sample_number, role)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS decisions (  -- of user-written filters, about groups that their other filters accept
    group_number INTEGER PRIMARY KEY REFERENCES groups(number),
    accepted INTEGER NOT NULL,       -- 1: the group may join a batch; 0: its samples ended with the decision
    reason TEXT NOT NULL,            -- why the filter could not decide; empty: it did
    survivors TEXT NOT NULL          -- JSON list of sample ids: the members whose rewards it got, in order
);
CREATE TABLE IF NOT EXISTS batches (
    step INTEGER PRIMARY KEY,
    formed REAL NOT NULL,            -- Unix time
    groups INTEGER NOT NULL,         -- number of groups
    samples TEXT NOT NULL            -- JSON list of sample ids, in the order of the batch
);
CREATE TABLE IF NOT EXISTS applied (   -- a trainer incarnation applied a batch; replays have their own rows
    step INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    metrics TEXT NOT NULL,           -- JSON
    time REAL NOT NULL,
    PRIMARY KEY (step, incarnation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mixture (   -- state of rljob.scheduling.mixture, changed with each group that starts or ends
    task TEXT PRIMARY KEY,
    rows INTEGER NOT NULL,           -- of the task's data that were started
    deficit REAL NOT NULL,
    rate REAL NOT NULL,
    expected REAL NOT NULL,
    accepted REAL NOT NULL,
    finished REAL NOT NULL,
    rejections_in_a_row INTEGER NOT NULL  -- -1: a group was accepted in this step
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS step_metrics (   -- computed when the batch was first applied
    step INTEGER PRIMARY KEY,
    metrics TEXT NOT NULL            -- JSON, name → number
);
CREATE TABLE IF NOT EXISTS incarnations (
    incarnation INTEGER PRIMARY KEY,
    instance TEXT NOT NULL,
    step INTEGER NOT NULL,           -- of the checkpoint that it started from
    time REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS publications (
    lineage INTEGER NOT NULL,
    step INTEGER NOT NULL,           -- policy version
    digest TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    time REAL NOT NULL,
    PRIMARY KEY (lineage, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS served (    -- an engine acknowledged weights; digest of the received bytes
    engine TEXT NOT NULL,            -- instance of the engine
    lineage INTEGER NOT NULL,
    step INTEGER NOT NULL,           -- policy version
    digest TEXT NOT NULL,
    time REAL NOT NULL,
    PRIMARY KEY (engine, lineage, step)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoints (
    step INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    removed INTEGER NOT NULL DEFAULT 0,   -- 1: newer ones replaced it; 2: refused, because it was missing or damaged
    time REAL NOT NULL,
    digest TEXT NOT NULL             -- of its record (rljob.protocol.checkpoint_record); empty: not reported
);
CREATE TABLE IF NOT EXISTS warnings (
    number INTEGER PRIMARY KEY,      -- from 1
    time REAL NOT NULL,
    message TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS evaluations (
    version INTEGER NOT NULL,
    task TEXT NOT NULL,
    problems INTEGER NOT NULL,
    samples INTEGER NOT NULL,        -- of each problem
    failed INTEGER NOT NULL,         -- samples
    mean_reward REAL NOT NULL,       -- over all samples
    accuracy REAL NOT NULL,          -- fraction of samples with a reward of at least evaluation.passReward
    pass_at TEXT NOT NULL,           -- JSON, k → pass@k
    failure TEXT NOT NULL,           -- why the last sample failed; empty: none did
    time REAL NOT NULL,
    PRIMARY KEY (version, task)
) WITHOUT ROWID;
