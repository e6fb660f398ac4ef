-- Steps, and records that are inserted completed.
--
-- What an attempt has finished on its way is kept in its record, under its token, for the next attempt to go on after it.

-- Notes what an attempt has finished on its way: its step with this number, counted from 0. Outcomes: recorded; differs, where
-- another step has this number or one before it is missing; full; fenced; locked.
CREATE OR REPLACE FUNCTION oncegate.step(
    id bytea,
    token bigint,
    number integer,
    name text,
    result bytea,
    OUT outcome text,
    OUT clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    r oncegate.records;
    count integer;
    octets bigint;
BEGIN
    IF (step.number >= 0 AND octet_length(step.name) BETWEEN 1 AND 255 AND octet_length(step.result) <= 1048576) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a step has a number from 0, a name of 1 to 255 octets, and a result of 1 MiB at most'
            USING ERRCODE = '22023';
    END IF;
    clock := oncegate.now_ms();
    -- Only a row that is the sender's own is ever locked, so that a stale owner is in nobody's way.
    SELECT t.* INTO r FROM oncegate.records AS t
        WHERE t.id = step.id AND t.token = step.token AND t.state = 'in-progress' AND step.clock < t.expires_at
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.records AS t
            WHERE t.id = step.id AND t.token = step.token AND t.state = 'in-progress' AND step.clock < t.expires_at;
        outcome := CASE WHEN FOUND THEN 'locked' ELSE 'fenced' END;
        RETURN;
    END IF;
    count := coalesce(array_length(r.step_names, 1), 0);
    IF step.number < count THEN
        -- The same one, sent again because its answer was lost.
        outcome := CASE WHEN r.step_names[step.number + 1] = step.name AND r.step_results[step.number + 1] = step.result
            THEN 'recorded' ELSE 'differs' END;
        RETURN;
    ELSIF step.number > count THEN
        outcome := 'differs';
        RETURN;
    END IF;
    SELECT coalesce(sum(octet_length(s.name) + octet_length(s.result)), 0) INTO octets
        FROM unnest(r.step_names, r.step_results) AS s (name, result);
    IF count >= 256 OR octets + octet_length(step.name) + octet_length(step.result) > 1048576 THEN
        outcome := 'full';
        RETURN;
    END IF;
    outcome := 'recorded';
    UPDATE oncegate.records AS t SET
            step_names = array_append(t.step_names, step.name), step_results = array_append(t.step_results, step.result)
        WHERE t.id = step.id;
END
$$;

-- The steps of a record, in the order in which they were noted; no row where there are none, or where its retention is over.
CREATE OR REPLACE FUNCTION oncegate.steps(id bytea) RETURNS TABLE (token bigint, names text[], results bytea[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT t.token, t.step_names, t.step_results FROM oncegate.records AS t
        WHERE t.id = steps.id AND t.step_names IS NOT NULL AND oncegate.now_ms() < t.expires_at;
END
$$;

-- Reads a record with its steps, in one look; no row where its retention is over.
CREATE OR REPLACE FUNCTION oncegate.lookup_with_steps(id bytea) RETURNS TABLE (
    state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint,
    after_abandoned boolean, caller bytea, operation text, created_at bigint, changed_at bigint, expires_at bigint,
    response bytea, clock bigint, names text[], results bytea[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    clock := oncegate.now_ms();
    RETURN QUERY SELECT t.state, t.fingerprint, t.token, t.attempts, t.attempt, t.lease_until, t.after_abandoned, t.caller,
            t.operation, t.created_at, t.changed_at, t.expires_at, t.response, lookup_with_steps.clock, t.step_names,
            t.step_results
        FROM oncegate.records AS t WHERE t.id = lookup_with_steps.id AND lookup_with_steps.clock < t.expires_at;
END
$$;

-- Reads a record with its steps and marks, in one look; no row where its retention is over.
CREATE OR REPLACE FUNCTION oncegate.lookup_record(id bytea) RETURNS TABLE (
    state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint,
    after_abandoned boolean, caller bytea, operation text, created_at bigint, changed_at bigint, expires_at bigint,
    response bytea, clock bigint, names text[], results bytea[], key_tag bytea, by_operator boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    clock := oncegate.now_ms();
    RETURN QUERY SELECT t.state, t.fingerprint, t.token, t.attempts, t.attempt, t.lease_until, t.after_abandoned, t.caller,
            t.operation, t.created_at, t.changed_at, t.expires_at, t.response, lookup_record.clock, t.step_names,
            t.step_results, t.key_tag, t.by_operator
        FROM oncegate.records AS t WHERE t.id = lookup_record.id AND lookup_record.clock < t.expires_at;
END
$$;

-- For a transaction that completes its record itself, before its end: with oncegate.complete_reserved, which inserts it once,
-- where claim and complete write it twice. Gives the number of the transaction where there is no record: nothing is
-- written, and until the transaction ends everybody else hears in-progress. Null where there is a record, or somebody else
-- is about to insert one: oncegate.claim says more.
--
-- First the lock, then a look with a snapshot that is younger than the lock: whoever had it before has committed by then.
-- Above READ COMMITTED the look may be older, and oncegate.complete_reserved finds the record with SQLSTATE 40001.
CREATE OR REPLACE FUNCTION oncegate.reserve(id bytea) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF reserve.id IS NULL OR octet_length(reserve.id) <> 32 THEN
        RAISE EXCEPTION 'oncegate: id must have 32 octets' USING ERRCODE = '22023';
    END IF;
    IF pg_try_advisory_xact_lock(hashtextextended(encode(reserve.id, 'hex'), 1868784485)) THEN
        PERFORM FROM oncegate.records AS t WHERE t.id = reserve.id;
        IF NOT FOUND THEN
            RETURN txid_current();
        END IF;
    END IF;
    RETURN NULL;
END
$$;

-- Both in one call: reserves, or else claims. Where transaction is not null, the rest is null.
CREATE OR REPLACE FUNCTION oncegate.reserve_or_claim(
    id bytea,
    attempt bytea,
    fingerprint bytea,
    lease_ms bigint,
    retention_ms bigint,
    on_abandoned text DEFAULT 'park',
    caller bytea DEFAULT decode('0000000000000000', 'hex'),
    operation text DEFAULT '',
    OUT transaction bigint,
    OUT outcome text,
    OUT token bigint,
    OUT attempts bigint,
    OUT lease_until bigint,
    OUT after_abandoned boolean,
    OUT lease_left_ms bigint,
    OUT response bytea,
    OUT clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    transaction := oncegate.reserve(reserve_or_claim.id);
    IF transaction IS NULL THEN
        SELECT c.outcome, c.token, c.attempts, c.lease_until, c.after_abandoned, c.lease_left_ms, c.response, c.clock
            INTO outcome, token, attempts, lease_until, after_abandoned, lease_left_ms, response, clock
            FROM oncegate.claim(reserve_or_claim.id, reserve_or_claim.attempt, reserve_or_claim.fingerprint,
                reserve_or_claim.lease_ms, reserve_or_claim.retention_ms, reserve_or_claim.on_abandoned,
                reserve_or_claim.caller, reserve_or_claim.operation) AS c;
    END IF;
END
$$;

-- Inserts the completed record of the transaction that oncegate.reserve gave the number of, and gives its token. OG001:
-- there is a record after all, or that transaction has been rolled back; roll back, too. Null: it was committed, without the
-- record; the record is unknown then, so that nobody does it again, and is to be committed.
CREATE OR REPLACE FUNCTION oncegate.complete_reserved(
    id bytea,
    transaction bigint,
    fingerprint bytea,
    response bytea,
    retention_ms bigint,
    caller bytea,
    operation text
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    is_watched boolean;
BEGIN
    IF (octet_length(complete_reserved.id) = 32 AND octet_length(complete_reserved.fingerprint) = 33
        AND oncegate.may_be_response(complete_reserved.response) AND complete_reserved.retention_ms BETWEEN 1 AND 34560000000
        AND octet_length(complete_reserved.caller) IN (8, 16) AND octet_length(complete_reserved.operation) <= 256
        AND complete_reserved.transaction > 0) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: an argument of complete_reserved is not what the contract says' USING ERRCODE = '22023';
    END IF;
    IF complete_reserved.transaction = txid_current() THEN
        -- The watch is looked at as oncegate.tell does it.
        INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, caller, key_tag, operation,
                created_at, changed_at, expires_at, purge_at, response)
            VALUES (complete_reserved.id, 'completed', complete_reserved.fingerprint, clock, 1,
                substr(complete_reserved.caller, 1, 8), oncegate.key_tag(complete_reserved.caller), complete_reserved.operation,
                clock, clock, clock + complete_reserved.retention_ms,
                oncegate.purge_at(0, clock + complete_reserved.retention_ms, clock), complete_reserved.response)
            ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING
            RETURNING NOT (CASE WHEN pg_try_advisory_lock(oncegate.watch_key(t.id))
                THEN pg_advisory_unlock(oncegate.watch_key(t.id)) ELSE false END) INTO is_watched;
        IF FOUND THEN
            IF is_watched THEN
                PERFORM oncegate.tell(complete_reserved.id);
            END IF;
            RETURN clock;
        END IF;
    ELSIF txid_status(complete_reserved.transaction) IS DISTINCT FROM 'aborted'
        AND pg_try_advisory_xact_lock(hashtextextended(encode(complete_reserved.id, 'hex'), 1868784485))
    THEN
        INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, caller, key_tag, operation,
                created_at, changed_at, expires_at, purge_at)
            VALUES (complete_reserved.id, 'unknown', complete_reserved.fingerprint, clock, 1,
                substr(complete_reserved.caller, 1, 8), oncegate.key_tag(complete_reserved.caller), complete_reserved.operation,
                clock, clock, clock + complete_reserved.retention_ms,
                oncegate.purge_at(0, clock + complete_reserved.retention_ms, clock))
            ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING;
        IF FOUND THEN
            RETURN NULL;
        END IF;
    END IF;
    RAISE EXCEPTION 'oncegate: the transaction has no right to complete this record, and its effect must not take place'
        USING ERRCODE = 'OG001', HINT = 'Roll back. Another one has completed it, or the transaction that reserved it is over.';
END
$$;

