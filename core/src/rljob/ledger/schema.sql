-- The ledger: admissions, decisions and publications of a run. Rows are added and their states advance; none is deleted.
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,              -- train | evaluation
    seq INTEGER NOT NULL,            -- order of admission; in an evaluation the order within it
    task TEXT NOT NULL,
    row INTEGER NOT NULL,
    version INTEGER NOT NULL,        -- trainer version at admission; in an evaluation the pinned version
    restarts INTEGER NOT NULL        -- number of earlier groups of the same prompt
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
    id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups(id),
    member INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,     -- first attempt that counts, raised when generated tokens are discarded
    state TEXT NOT NULL DEFAULT 'admitted', -- admitted | scored | batched | trained | filtered | surplus | expired | failed | evaluated
    reason TEXT NOT NULL DEFAULT '',
    reward REAL,
    turn_rewards TEXT,                      -- JSON list, one number for each turn; the sum is the reward, except for rounding
    prompt_tokens INTEGER,                  -- of the first turn
    response_tokens INTEGER,                -- written by the model, over all turns
    total_tokens INTEGER,                   -- of the sequence: prompt, model and observations
    dispatched INTEGER,                     -- version of the engine that holds its open request; NULL: none
    min_version INTEGER,
    max_version INTEGER,
    finish TEXT,
    step INTEGER,                           -- of its batch
    advantage REAL                          -- used by the trainer; NULL: not reported
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS scores (         -- of each sample with a reward: what later changes of the sample must not copy
    sample TEXT PRIMARY KEY REFERENCES samples(id),
    metrics TEXT NOT NULL,                  -- JSON
    text TEXT NOT NULL                      -- of the last turn
);
CREATE TABLE IF NOT EXISTS failures (       -- samples that failed by themselves; the other samples of their groups end with them
    number INTEGER PRIMARY KEY,             -- from 1, in order of time
    sample TEXT NOT NULL UNIQUE REFERENCES samples(id)
);
CREATE INDEX IF NOT EXISTS samples_by_group ON samples (group_id);
CREATE INDEX IF NOT EXISTS samples_open ON samples (state) WHERE state IN ('admitted', 'scored', 'batched');
CREATE INDEX IF NOT EXISTS samples_by_step ON samples (step) WHERE step IS NOT NULL;
CREATE TABLE IF NOT EXISTS completions (
    sample TEXT NOT NULL REFERENCES samples(id),
    turn INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    finish TEXT NOT NULL,            -- stop | length | abort (a prefix)
    tokens INTEGER NOT NULL,
    engine TEXT NOT NULL,
    digest TEXT NOT NULL,            -- blake3 of the payload record
    segment INTEGER NOT NULL,
    position INTEGER NOT NULL,
    length INTEGER NOT NULL,
    PRIMARY KEY (sample, turn, attempt)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
    step INTEGER PRIMARY KEY,
    samples TEXT NOT NULL,           -- JSON list of sample ids, in the order of the batch
    formed REAL NOT NULL             -- Unix time
);
CREATE TABLE IF NOT EXISTS applied (   -- a trainer incarnation applied a batch; replays have their own rows
    step INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    metrics TEXT NOT NULL,           -- JSON
    time REAL NOT NULL,
    PRIMARY KEY (step, incarnation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS mixture (   -- state of rljob.scheduling.mixture after the last step
    task TEXT PRIMARY KEY,
    version INTEGER NOT NULL,        -- trainer version after the step
    deficit REAL NOT NULL,
    rate REAL NOT NULL,
    expected REAL NOT NULL,
    accepted REAL NOT NULL,
    finished REAL NOT NULL
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
    time REAL NOT NULL,
    PRIMARY KEY (version, task)
) WITHOUT ROWID;
