-- Oncegate, contract version 6 for PostgreSQL 14 and later. One key, one effect.
--
-- This SQL brings a database to this version: an empty one, one of any earlier version, and one of this version, whose
-- functions it makes again. It may be run at any time and as often as one likes, as the owner of the schema, in one
-- transaction at READ COMMITTED; while it runs, everybody else goes on. What callers may rely on is in
-- docs/reference/store-contract-postgres.md.

-- Before anything else. What follows binds to the server's own functions, operators and types. In the search path of a
-- session, a function that another role has put into `public` may match the types of the arguments better, and it would run
-- with the rights of the owner for ever after.
-- With quote_all_identifiers, the server would write this very setting down in quotation marks.
SET LOCAL quote_all_identifiers = off;
SET LOCAL search_path = pg_catalog, pg_temp;
-- Other settings of the role or of the database that would change what this SQL makes, or stop it. None is needed for strings:
-- this SQL has no backslash, so that standard_conforming_strings changes nothing, neither here nor in a session that calls a
-- function.
SET LOCAL client_min_messages = warning;
SET LOCAL statement_timeout = 0;
SET LOCAL check_function_bodies = on;
SET LOCAL plpgsql.extra_errors = 'none';
SET LOCAL oncegate.adds_marks = 'off';

DO $$
DECLARE
    latest integer;
    schema_owner oid;
    stranger text;
BEGIN
    IF pg_catalog.current_setting('search_path') OPERATOR(pg_catalog.<>) 'pg_catalog, pg_temp' THEN
        RAISE EXCEPTION 'oncegate: run this SQL in one transaction' USING ERRCODE = '25P01';
    END IF;
    IF current_setting('server_version_num')::integer < 140000 THEN
        RAISE EXCEPTION 'oncegate: PostgreSQL 14 or later is needed' USING ERRCODE = '0A000';
    END IF;
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'oncegate: the database must have the encoding UTF8' USING ERRCODE = '0A000';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'oncegate: run this SQL at READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    -- One at a time. This lock is in nobody's way but that of another one who runs this SQL.
    PERFORM set_config('lock_timeout', '60s', true);
    PERFORM pg_advisory_xact_lock(7956004179840295781);
    -- A table is waited for only for a moment, because every claim waits behind the one who waits for its table; a moment
    -- longer than deadlock_timeout (1 s), when an autovacuum gives way. Where it was not enough: try again a little later.
    PERFORM set_config('lock_timeout', '1200ms', true);

    SELECT n.nspowner INTO schema_owner FROM pg_namespace AS n WHERE n.nspname = 'oncegate';
    IF NOT FOUND THEN
        CREATE SCHEMA oncegate;
        COMMENT ON SCHEMA oncegate IS 'Oncegate: one key, one effect. Call the functions; write to no table.';
        RETURN;
    END IF;
    -- Nothing of another owner's is called, extended or trusted: it would run with the rights of this role.
    IF schema_owner <> (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user) THEN
        RAISE EXCEPTION 'oncegate: the schema oncegate belongs to %, and this is %', schema_owner::regrole, current_user
            USING ERRCODE = '42501', HINT = 'Connect as the owner of the schema.';
    END IF;
    SELECT o.what INTO stranger FROM (
        SELECT 'the table or sequence ' || c.relname::text AS what FROM pg_class AS c
        WHERE c.relnamespace = 'oncegate'::regnamespace AND c.relowner <> schema_owner
        UNION ALL
        SELECT 'the function ' || p.proname::text FROM pg_proc AS p
        WHERE p.pronamespace = 'oncegate'::regnamespace AND p.proowner <> schema_owner
    ) AS o LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'oncegate: % in the schema oncegate belongs to another role than the schema', stranger
            USING ERRCODE = '42501', HINT = 'Find out who made it and why, and drop it or give it to the owner of the schema.';
    END IF;
    IF to_regclass('oncegate.contract') IS NULL THEN
        IF EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = 'oncegate'::regnamespace)
            OR EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = 'oncegate'::regnamespace)
        THEN
            RAISE EXCEPTION 'oncegate: there is a schema oncegate that is not of Oncegate' USING ERRCODE = '42P06';
        END IF;
        RETURN;
    END IF;
    SELECT max(c.version) INTO latest FROM oncegate.contract AS c;
    IF latest > 6 THEN
        RAISE EXCEPTION 'oncegate: the database has version % of the contract, and this SQL makes version 6', latest
            USING ERRCODE = '55000', HINT = 'Take the SQL of a newer program.';
    END IF;
END
$$;

-- Which contract this is: the greatest version. It never goes back.
DO $$
BEGIN
    IF to_regclass('oncegate.contract') IS NULL THEN
        CREATE TABLE oncegate.contract (
            version integer PRIMARY KEY,
            applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
        );
    ELSIF (
        SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef AS d
        JOIN pg_attribute AS a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
        WHERE d.adrelid = 'oncegate.contract'::regclass AND a.attname = 'applied_at'
    ) IS DISTINCT FROM 'clock_timestamp()' THEN
        -- The only default that calls something. It may be bound to another role's function, which the INSERT below would run
        -- with the rights of this role.
        ALTER TABLE oncegate.contract ALTER COLUMN applied_at SET DEFAULT clock_timestamp();
    END IF;
END
$$;

-- Times are milliseconds since 1970 by the clock of this server (oncegate.now_ms). There are no CHECK constraints: the server
-- prepares each of them anew for every statement, and together they cost as much as all the rest of a claim. What writes
-- here checks what it is given.
DO $$
BEGIN
    IF to_regclass('oncegate.records') IS NULL THEN
        CREATE TABLE oncegate.records (
            id bytea NOT NULL,
            -- in-progress (then attempt, lease_until and after_abandoned are there), unknown, completed (then the response
            -- is), awaited, tombstone, released
            state text NOT NULL,
            fingerprint bytea NOT NULL,
            token bigint NOT NULL,
            attempts bigint NOT NULL,
            attempt bytea,
            lease_until bigint,
            after_abandoned boolean,
            caller bytea NOT NULL,
            -- The tag of the key; null where whoever claimed the record did not give it.
            key_tag bytea,
            operation text NOT NULL,
            created_at bigint NOT NULL,
            changed_at bigint NOT NULL,
            expires_at bigint NOT NULL,
            -- When a purge looks at the row. Renewals and completions leave it alone, so that they stay heap-only updates: it
            -- may be earlier than expires_at (a purge then moves it) and is rarely later. See oncegate.purge_at.
            purge_at bigint NOT NULL,
            -- In the published encoding: see oncegate.response.
            response bytea,
            -- Null where there are none. As many names as results; at most 256, and 1 MiB together.
            step_names text[],
            step_results bytea[],
            -- Whether an operator put the record into its state: only then may an operator take it back.
            by_operator boolean NOT NULL DEFAULT false,
            CONSTRAINT records_pkey PRIMARY KEY (id)
        ) WITH (
            fillfactor = 70,
            autovacuum_vacuum_scale_factor = 0.02,
            autovacuum_vacuum_insert_scale_factor = 0.05,
            autovacuum_analyze_scale_factor = 0.05,
            toast.autovacuum_vacuum_scale_factor = 0.05
        );
        COMMENT ON COLUMN oncegate.records.fingerprint IS 'one octet version, 32 octets digest';
        COMMENT ON COLUMN oncegate.records.caller IS 'a mark that tells callers apart, not who they are';
        COMMENT ON COLUMN oncegate.records.key_tag IS 'a mark of the key, by which operators find it; not the key';
        CREATE INDEX records_purge_at ON oncegate.records (purge_at);
        CREATE TABLE oncegate.audit (
            number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            at bigint NOT NULL,
            id bytea NOT NULL,
            state_before text NOT NULL,
            state_after text NOT NULL,
            actor text NOT NULL,
            reason text NOT NULL
        );
        RETURN;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = 'oncegate.records'::regclass AND a.attname = 'step_names')
    THEN
        -- Of version 1.
        ALTER TABLE oncegate.records ADD COLUMN step_names text[], ADD COLUMN step_results bytea[];
    END IF;
    IF NOT EXISTS (SELECT FROM pg_attribute AS a WHERE a.attrelid = 'oncegate.records'::regclass AND a.attname = 'by_operator')
    THEN
        -- Of versions 1 to 4. No row is written anew. What was resolved before counts as the answer of its owner.
        ALTER TABLE oncegate.records ADD COLUMN key_tag bytea, ADD COLUMN by_operator boolean NOT NULL DEFAULT false;
        COMMENT ON COLUMN oncegate.records.key_tag IS 'a mark of the key, by which operators find it; not the key';
        -- For the grants of the functions that read these columns.
        PERFORM set_config('oncegate.adds_marks', 'on', true);
    END IF;
END
$$;

-- How far purges have got in each table, so that they need not step over what they have removed for as long as an old
-- snapshot keeps it from being vacuumed. See oncegate.purge_from.
DO $$
BEGIN
    IF to_regclass('oncegate.purge_marks') IS NULL THEN
        CREATE TABLE oncegate.purge_marks (
            name text PRIMARY KEY,
            -- No row but those that came late has a purge_at before this.
            place bigint NOT NULL,
            -- When a purge last began at the first row.
            begun_at bigint NOT NULL
        ) WITH (fillfactor = 10);
        INSERT INTO oncegate.purge_marks (name, place, begun_at) VALUES ('records', 0, 0), ('processed', 0, 0);
    END IF;
END
$$;

-- Messages. One row of `processed` for each message of each consumer, for as long as it is remembered; dead letters are as they
-- were delivered, until an operator deletes them or has them processed again.
DO $$
BEGIN
    IF to_regclass('oncegate.processed') IS NULL THEN
        CREATE TABLE oncegate.processed (
            id bytea NOT NULL,
            -- When it got into its state, when it is forgotten, and when a purge looks at it; see oncegate.purge_at.
            changed_at bigint NOT NULL,
            expires_at bigint NOT NULL,
            purge_at bigint NOT NULL,
            -- Who has begun it and said nothing since.
            begun_by bigint,
            -- Attempts that failed, or whose process ended within them; of what is processed the one that succeeded, too.
            attempts integer NOT NULL,
            -- o: open, it failed or was begun; p: processed; d: dead
            state "char" NOT NULL,
            -- Of what is dead: why.
            reason text,
            -- Of its payload, where consumers compare it.
            digest bytea,
            CONSTRAINT processed_pkey PRIMARY KEY (id)
        ) WITH (
            fillfactor = 85,
            autovacuum_vacuum_scale_factor = 0.02,
            autovacuum_vacuum_insert_scale_factor = 0.05,
            autovacuum_analyze_scale_factor = 0.05
        );
        COMMENT ON COLUMN oncegate.processed.state IS 'o: open, it failed or was begun; p: processed; d: dead';
        CREATE INDEX processed_purge_at ON oncegate.processed (purge_at);
        CREATE TABLE oncegate.dead_letters (
            number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            id bytea NOT NULL,
            consumer text NOT NULL,
            reason text NOT NULL,
            attempts integer NOT NULL,
            error text NOT NULL,
            topic text NOT NULL,
            broker_id text,
            order_key bytea,
            header_names text[] NOT NULL,
            header_values bytea[] NOT NULL,
            payload bytea NOT NULL,
            at bigint NOT NULL
        );
        CREATE INDEX dead_letters_consumer ON oncegate.dead_letters (consumer, number);
        -- How far a consumer has got in each stream of events.
        CREATE TABLE oncegate.stream_positions (
            consumer text NOT NULL,
            stream text NOT NULL,
            next bigint NOT NULL,
            changed_at bigint NOT NULL,
            CONSTRAINT stream_positions_pkey PRIMARY KEY (consumer, stream)
        ) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
        -- Events that came before their turn.
        CREATE TABLE oncegate.parked_events (
            consumer text NOT NULL,
            stream text NOT NULL,
            sequence bigint NOT NULL,
            event bytea NOT NULL,
            at bigint NOT NULL,
            CONSTRAINT parked_events_pkey PRIMARY KEY (consumer, stream, sequence)
        ) WITH (autovacuum_vacuum_scale_factor = 0.02);
    END IF;
END
$$;

-- The outbox. Every row is inserted once, changed perhaps, and deleted. A change leaves the indexes alone unless the row is
-- refused. No vacuum takes the lock that it takes to give pages back: the pages are used again.
DO $$
BEGIN
    IF to_regclass('oncegate.outbox') IS NULL THEN
        -- Without a cache: of two transactions that ran one after the other, the later one has the greater numbers.
        CREATE SEQUENCE oncegate.outbox_seq AS bigint MINVALUE 0 START 0 CACHE 1;
        -- Part of what tells leases apart; the other part is the time, see oncegate.outbox_lease.
        CREATE SEQUENCE oncegate.outbox_token AS bigint CACHE 1;
        CREATE TABLE oncegate.outbox (
            seq bigint NOT NULL,
            -- Below 0: what a topic and an order key are hashed to. Otherwise the seq.
            line bigint NOT NULL,
            created_at bigint NOT NULL,
            -- Not to be taken before: by a lease where there is a token, after a failure where there is none.
            free_at bigint NOT NULL DEFAULT 0,
            token bigint,
            refused_at bigint,
            attempts integer NOT NULL DEFAULT 0,
            -- Refused, and nobody waits behind it.
            is_aside boolean NOT NULL DEFAULT false,
            id text NOT NULL,
            topic text NOT NULL,
            order_key bytea,
            header_names text[] NOT NULL,
            header_values bytea[] NOT NULL,
            payload bytea NOT NULL,
            -- What the last attempt failed of.
            error text,
            CONSTRAINT outbox_pkey PRIMARY KEY (is_aside, line, seq)
        ) WITH (
            fillfactor = 80,
            vacuum_truncate = false,
            autovacuum_vacuum_scale_factor = 0,
            autovacuum_vacuum_threshold = 2000,
            autovacuum_vacuum_insert_scale_factor = 0.2,
            autovacuum_analyze_scale_factor = 0.2,
            autovacuum_analyze_threshold = 2000,
            autovacuum_vacuum_cost_delay = 0,
            toast.vacuum_truncate = false,
            toast.autovacuum_vacuum_scale_factor = 0,
            toast.autovacuum_vacuum_threshold = 2000,
            toast.autovacuum_vacuum_cost_delay = 0
        );
        CREATE INDEX outbox_refused ON oncegate.outbox (seq) WHERE refused_at IS NOT NULL;
    END IF;
END
$$;

