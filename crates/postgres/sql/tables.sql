-- Oncegate: the contract for PostgreSQL 14 and later. One key, one effect.
--
-- This SQL creates the contract in an empty database, upgrades a database of an earlier version, and replaces the functions of
-- a database of this version. Run it in one transaction at READ COMMITTED, as the owner of the schema, at any time and as often
-- as you like: callers go on meanwhile. docs/reference/store-contract-postgres.md says what callers may rely on.

-- These settings come first. Everything below must bind to the server's own functions, operators and types. With the search
-- path of a session, a function that another role created in `public` may match the argument types better, and it would run
-- with the rights of the owner from then on. With quote_all_identifiers, the server would store the search path of each
-- function in quotation marks.
SET LOCAL quote_all_identifiers = off;
SET LOCAL search_path = pg_catalog, pg_temp;
-- Other settings of the role or of the database that would change the result of this SQL, or stop it. Strings need no setting:
-- this SQL contains no backslash, so standard_conforming_strings changes nothing, neither here nor in a session that calls a
-- function.
SET LOCAL client_min_messages = warning;
SET LOCAL statement_timeout = 0;
SET LOCAL check_function_bodies = on;
SET LOCAL plpgsql.extra_errors = 'none';
-- The version that this SQL creates.
SET LOCAL oncegate.version = 1;

DO $$
DECLARE
    version integer;
    latest integer;
    schema_owner oid;
    foreign_object text;
BEGIN
    IF pg_catalog.current_setting('search_path') OPERATOR(pg_catalog.<>) 'pg_catalog, pg_temp' THEN
        RAISE EXCEPTION 'oncegate: run this SQL in one transaction' USING ERRCODE = '25P01';
    END IF;
    IF current_setting('server_version_num')::integer < 140000 THEN
        RAISE EXCEPTION 'oncegate: this SQL needs PostgreSQL 14 or later' USING ERRCODE = '0A000';
    END IF;
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'oncegate: the database must have the encoding UTF8' USING ERRCODE = '0A000';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'oncegate: run this SQL at READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    version := current_setting('oncegate.version')::integer;
    -- Two runs of this SQL must not overlap. The lock blocks no caller of the contract.
    PERFORM set_config('lock_timeout', '60s', true);
    PERFORM pg_advisory_xact_lock(7956004179840295781);
    -- While this SQL waits for the lock of a table, every claim waits behind it. So it waits only a little longer than
    -- deadlock_timeout (1 s), after which an autovacuum gives way. If that is not enough, run the SQL again a little later.
    PERFORM set_config('lock_timeout', '1200ms', true);

    SELECT n.nspowner INTO schema_owner FROM pg_namespace AS n WHERE n.nspname = 'oncegate';
    IF NOT FOUND THEN
        CREATE SCHEMA oncegate;
        COMMENT ON SCHEMA oncegate IS 'Oncegate: one key, one effect. Call the functions; write to no table.';
        RETURN;
    END IF;
    -- Objects of another owner are neither called nor extended: they would run with the rights of this role.
    IF schema_owner <> (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user) THEN
        RAISE EXCEPTION 'oncegate: the schema oncegate belongs to %, and this is %', schema_owner::regrole, current_user
            USING ERRCODE = '42501', HINT = 'Connect as the owner of the schema.';
    END IF;
    SELECT o.description INTO foreign_object FROM (
        SELECT 'the table or sequence ' || c.relname::text AS description FROM pg_class AS c
        WHERE c.relnamespace = 'oncegate'::regnamespace AND c.relowner <> schema_owner
        UNION ALL
        SELECT 'the function ' || p.proname::text FROM pg_proc AS p
        WHERE p.pronamespace = 'oncegate'::regnamespace AND p.proowner <> schema_owner
    ) AS o LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'oncegate: % in the schema oncegate belongs to another role than the schema', foreign_object
            USING ERRCODE = '42501', HINT = 'Find out who created it and why. Then drop it, or give it to the owner of the schema.';
    END IF;
    IF to_regclass('oncegate.contract') IS NULL THEN
        IF EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = 'oncegate'::regnamespace)
            OR EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = 'oncegate'::regnamespace)
        THEN
            RAISE EXCEPTION 'oncegate: the schema oncegate exists and was not created by Oncegate' USING ERRCODE = '42P06';
        END IF;
        RETURN;
    END IF;
    SELECT max(c.version) INTO latest FROM oncegate.contract AS c;
    IF latest > version THEN
        RAISE EXCEPTION 'oncegate: the database has version % of the contract, and this SQL creates version %', latest, version
            USING ERRCODE = '55000', HINT = 'Use the SQL of a newer program.';
    END IF;
END
$$;

-- The greatest version is the version of the database. It never decreases.
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
        -- The only default that calls a function. If it is bound to the function of another role, the INSERT of the version
        -- would run that function with the rights of this role.
        ALTER TABLE oncegate.contract ALTER COLUMN applied_at SET DEFAULT clock_timestamp();
    END IF;
END
$$;

-- Times are milliseconds since 1970 by the clock of this server (oncegate.now_ms). There are no CHECK constraints: the server
-- prepares each of them again for every statement, and together they cost as much as the rest of a claim. The functions check
-- their arguments instead.
DO $$
BEGIN
    IF to_regclass('oncegate.records') IS NULL THEN
        CREATE TABLE oncegate.records (
            id bytea NOT NULL,
            -- in-progress (with attempt, lease_until and after_abandoned), unknown, completed (with response), awaited,
            -- tombstone or released.
            state text NOT NULL,
            fingerprint bytea NOT NULL,
            token bigint NOT NULL,
            attempts bigint NOT NULL,
            attempt bytea,
            lease_until bigint,
            after_abandoned boolean,
            caller bytea NOT NULL,
            -- The tag of the key; null if the claim did not give it.
            key_tag bytea,
            operation text NOT NULL,
            created_at bigint NOT NULL,
            changed_at bigint NOT NULL,
            expires_at bigint NOT NULL,
            -- The time at which a purge looks at the row. Renewals and completions do not change it, so that they stay
            -- heap-only updates. It may be earlier than expires_at (a purge then moves it), and is rarely later. See
            -- oncegate.purge_at.
            purge_at bigint NOT NULL,
            -- In the published encoding: see oncegate.response.
            response bytea,
            -- Null if there are no steps. As many names as results: at most 256, and 1 MiB together.
            step_names text[],
            step_results bytea[],
            -- True if an operator put the record into its state. Only then may an operator take it back.
            by_operator boolean NOT NULL DEFAULT false,
            CONSTRAINT records_pkey PRIMARY KEY (id)
        ) WITH (
            fillfactor = 70,
            autovacuum_vacuum_scale_factor = 0.02,
            autovacuum_vacuum_insert_scale_factor = 0.05,
            autovacuum_analyze_scale_factor = 0.05,
            toast.autovacuum_vacuum_scale_factor = 0.05
        );
        COMMENT ON COLUMN oncegate.records.fingerprint IS 'version (1 byte) and digest (32 bytes)';
        COMMENT ON COLUMN oncegate.records.caller IS 'a tag that tells callers apart, without their identity';
        COMMENT ON COLUMN oncegate.records.key_tag IS 'a tag by which operators find the key, not the key itself';
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
    END IF;
END
$$;

-- The progress of purges in each table. While an old snapshot keeps removed rows from being vacuumed, the next purge does not
-- have to step over them. See oncegate.purge_from.
DO $$
BEGIN
    IF to_regclass('oncegate.purge_marks') IS NULL THEN
        CREATE TABLE oncegate.purge_marks (
            name text PRIMARY KEY,
            -- Only rows that were committed late have an earlier purge_at.
            place bigint NOT NULL,
            -- The time at which a purge last began at the first row.
            begun_at bigint NOT NULL
        ) WITH (fillfactor = 10);
        INSERT INTO oncegate.purge_marks (name, place, begun_at) VALUES ('records', 0, 0), ('receipts', 0, 0);
    END IF;
END
$$;

-- Messages. `receipts` has a row for each message of each consumer, until its retention ends. A dead letter is kept as it was
-- delivered, until an operator deletes it or takes it out to have it processed again.
DO $$
BEGIN
    IF to_regclass('oncegate.receipts') IS NULL THEN
        CREATE TABLE oncegate.receipts (
            id bytea NOT NULL,
            -- The times at which it entered its state, expires, and is looked at by a purge (see oncegate.purge_at).
            changed_at bigint NOT NULL,
            expires_at bigint NOT NULL,
            purge_at bigint NOT NULL,
            -- The process that began it and has not reported an outcome yet.
            begun_by bigint,
            -- Attempts that failed or whose process died; of a processed message also the one that succeeded.
            attempts integer NOT NULL,
            -- o: open, because it failed or was begun; p: processed; d: dead
            state "char" NOT NULL,
            -- The reason why the message is dead.
            reason text,
            -- The digest of the payload, if the consumer compares payloads.
            digest bytea,
            CONSTRAINT receipts_pkey PRIMARY KEY (id)
        ) WITH (
            fillfactor = 85,
            autovacuum_vacuum_scale_factor = 0.02,
            autovacuum_vacuum_insert_scale_factor = 0.05,
            autovacuum_analyze_scale_factor = 0.05
        );
        COMMENT ON COLUMN oncegate.receipts.state IS 'o: open, because it failed or was begun; p: processed; d: dead';
        CREATE INDEX receipts_purge_at ON oncegate.receipts (purge_at);
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
        -- The position of each consumer in each stream of events.
        CREATE TABLE oncegate.stream_positions (
            consumer text NOT NULL,
            stream text NOT NULL,
            next bigint NOT NULL,
            changed_at bigint NOT NULL,
            CONSTRAINT stream_positions_pkey PRIMARY KEY (consumer, stream)
        ) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
        -- Events that arrived before their turn.
        CREATE TABLE oncegate.buffered_events (
            consumer text NOT NULL,
            stream text NOT NULL,
            sequence bigint NOT NULL,
            event bytea NOT NULL,
            at bigint NOT NULL,
            CONSTRAINT buffered_events_pkey PRIMARY KEY (consumer, stream, sequence)
        ) WITH (autovacuum_vacuum_scale_factor = 0.02);
    END IF;
END
$$;

-- Operators ask for the dead letters of a period. See oncegate.dead_letters_of_period.
DO $$
BEGIN
    IF to_regclass('oncegate.dead_letters_at') IS NULL THEN
        CREATE INDEX dead_letters_at ON oncegate.dead_letters (at, number);
    END IF;
END
$$;

-- The changes that operators made to dead letters and to messages of the outbox.
DO $$
BEGIN
    IF to_regclass('oncegate.message_audit') IS NULL THEN
        CREATE TABLE oncegate.message_audit (
            number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            at bigint NOT NULL,
            -- dead-letter or outbox
            kind text NOT NULL,
            -- The number of the dead letter, or the seq of the message.
            message bigint NOT NULL,
            -- The receipt in hexadecimal digits, or the identifier of the message.
            id text NOT NULL,
            consumer text,
            topic text NOT NULL,
            action text NOT NULL,
            actor text NOT NULL,
            reason text NOT NULL
        );
    END IF;
END
$$;

-- The outbox. Each row is inserted, possibly updated, and deleted. An update changes no index unless the message is refused.
-- vacuum_truncate is off, so that no vacuum takes the lock for returning pages: the pages are used again.
DO $$
BEGIN
    IF to_regclass('oncegate.outbox') IS NULL THEN
        -- No cache: of two transactions that ran one after the other, the later one has the greater numbers.
        CREATE SEQUENCE oncegate.outbox_seq AS bigint MINVALUE 0 START 0 CACHE 1;
        -- Makes leases distinct, together with the time: see oncegate.outbox_lease.
        CREATE SEQUENCE oncegate.outbox_token AS bigint CACHE 1;
        CREATE TABLE oncegate.outbox (
            seq bigint NOT NULL,
            -- Below 0: the hash of the topic and the order key. Otherwise the seq.
            line bigint NOT NULL,
            created_at bigint NOT NULL,
            -- No relay takes the row before this time: the end of its lease if it has a token, otherwise the end of its
            -- back-off.
            free_at bigint NOT NULL DEFAULT 0,
            token bigint,
            refused_at bigint,
            attempts integer NOT NULL DEFAULT 0,
            -- Refused, and no message waits behind it.
            is_aside boolean NOT NULL DEFAULT false,
            id text NOT NULL,
            topic text NOT NULL,
            order_key bytea,
            header_names text[] NOT NULL,
            header_values bytea[] NOT NULL,
            payload bytea NOT NULL,
            -- The error of the last attempt.
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

