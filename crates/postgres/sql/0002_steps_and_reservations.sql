-- Oncegate, contract version 2 for PostgreSQL 14 and later: version 1, and steps, and records that are inserted completed.
--
-- What an attempt has finished on its way is kept in its record, under its token, for the next attempt to go on after it. The
-- functions below are those of version 1 that have to know of it; what is new in them is what names step_names. To be run in one
-- transaction.

DO $$
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock(7956004179840295781);
    IF oncegate.contract_version() IS DISTINCT FROM 1 THEN
        RAISE EXCEPTION 'oncegate: the contract is not of version 1, and only that becomes version 2' USING ERRCODE = '42P06';
    END IF;
END
$$;

-- Null where there are none. As many names as results; at most 256, and 1 MiB together.
ALTER TABLE oncegate.records ADD COLUMN step_names text[], ADD COLUMN step_results bytea[];

-- Asks to execute. Outcomes: execute, replay, in-progress, mismatch, unknown, unreplayable; locked where the same attempt
-- claims again while somebody holds its record.
CREATE OR REPLACE FUNCTION oncegate.claim(
    id bytea,
    attempt bytea,
    fingerprint bytea,
    lease_ms bigint,
    retention_ms bigint,
    on_abandoned text DEFAULT 'park',
    caller bytea DEFAULT '\x0000000000000000',
    operation text DEFAULT '',
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
DECLARE
    r oncegate.records;
    is_there boolean;
    is_live boolean;
    to_lock boolean := false;
    may_insert boolean := false;
BEGIN
    IF claim.id IS NULL OR octet_length(claim.id) <> 32 THEN
        RAISE EXCEPTION 'oncegate: id must have 32 octets' USING ERRCODE = '22023';
    END IF;
    IF claim.attempt IS NULL OR octet_length(claim.attempt) <> 16 THEN
        RAISE EXCEPTION 'oncegate: attempt must have 16 octets' USING ERRCODE = '22023';
    END IF;
    IF claim.fingerprint IS NULL OR octet_length(claim.fingerprint) <> 33 THEN
        RAISE EXCEPTION 'oncegate: fingerprint must have 33 octets' USING ERRCODE = '22023';
    END IF;
    IF claim.on_abandoned IS NULL OR claim.on_abandoned NOT IN ('park', 'reexecute', 'reconcile') THEN
        RAISE EXCEPTION 'oncegate: on_abandoned must be park, reexecute or reconcile' USING ERRCODE = '22023';
    END IF;
    IF claim.caller IS NULL OR octet_length(claim.caller) <> 8 THEN
        RAISE EXCEPTION 'oncegate: caller must have 8 octets' USING ERRCODE = '22023';
    END IF;
    IF claim.operation IS NULL OR octet_length(claim.operation) > 256 THEN
        RAISE EXCEPTION 'oncegate: operation must have 256 octets at most' USING ERRCODE = '22023';
    END IF;
    IF (claim.lease_ms BETWEEN 1 AND 3600000 AND claim.retention_ms BETWEEN 1 AND 34560000000) IS NOT TRUE THEN
        PERFORM oncegate.check_duration('lease_ms', claim.lease_ms, 3600000);
        PERFORM oncegate.check_duration('retention_ms', claim.retention_ms, 34560000000);
    END IF;
    claim.clock := oncegate.now_ms();

    -- Each turn reads, decides, and comes again with what it needs to write: the row's lock, or the right to insert. A
    -- row that is purged or inserted in between costs one turn more.
    FOR turn IN 1..8 LOOP
        IF to_lock THEN
            SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = claim.id FOR UPDATE SKIP LOCKED;
            is_there := FOUND;
            IF NOT is_there THEN
                SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = claim.id;
                IF FOUND THEN
                    -- Somebody changes it in a transaction that is open: whatever comes of it, not now.
                    outcome := CASE WHEN r.attempt = claim.attempt THEN 'locked' ELSE 'in-progress' END;
                    lease_left_ms := greatest(coalesce(r.lease_until - clock, 0), 0);
                    RETURN;
                END IF;
                to_lock := false; -- purged just now
            END IF;
        ELSE
            SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = claim.id;
            is_there := FOUND;
        END IF;
        is_live := is_there AND clock < r.expires_at;

        IF is_live THEN
            -- A key that was released half-way is not free for another request.
            IF (r.state <> 'released' OR r.step_names IS NOT NULL) AND r.fingerprint <> claim.fingerprint THEN
                outcome := 'mismatch';
                RETURN;
            ELSIF r.state = 'completed' THEN
                outcome := 'replay';
                response := r.response;
                RETURN;
            ELSIF r.state IN ('awaited', 'tombstone') THEN
                outcome := 'unreplayable';
                RETURN;
            ELSIF r.state = 'unknown' THEN
                outcome := 'unknown';
                RETURN;
            ELSIF r.state = 'in-progress' THEN
                IF r.attempt <> claim.attempt AND clock < r.lease_until THEN
                    outcome := 'in-progress';
                    lease_left_ms := r.lease_until - clock;
                    RETURN;
                END IF;
            ELSIF r.state <> 'released' THEN
                RAISE EXCEPTION 'oncegate: a record has a state that this contract does not know' USING ERRCODE = 'OG003';
            END IF;
        END IF;

        -- From here on something is written.
        IF NOT is_there THEN
            IF NOT may_insert THEN
                IF NOT pg_try_advisory_xact_lock(hashtextextended(encode(claim.id, 'hex'), 1868784485)) THEN
                    outcome := 'in-progress'; -- somebody inserts it in a transaction that is open
                    lease_left_ms := 0;
                    RETURN;
                END IF;
                may_insert := true;
            END IF;
            INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, attempt, lease_until, after_abandoned,
                    caller, operation, created_at, changed_at, expires_at, purge_at)
                VALUES (claim.id, 'in-progress', claim.fingerprint, clock, 1, claim.attempt, clock + claim.lease_ms, false,
                    claim.caller, claim.operation, clock, clock, clock + claim.lease_ms + claim.retention_ms,
                    oncegate.purge_at(0, clock + claim.lease_ms + claim.retention_ms, clock))
                ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING;
            IF FOUND THEN
                outcome := 'execute';
                token := clock;
                attempts := 1;
                lease_until := clock + claim.lease_ms;
                after_abandoned := false;
                RETURN;
            END IF;
            CONTINUE; -- inserted before we got the lock: the unique index has the last word
        END IF;
        IF NOT to_lock THEN
            to_lock := true;
            CONTINUE;
        END IF;

        IF is_live AND r.state = 'in-progress' AND r.attempt = claim.attempt THEN
            -- The same claim, sent again because its answer was lost: the same token.
            outcome := 'execute';
            token := r.token;
            attempts := r.attempts;
            lease_until := clock + claim.lease_ms;
            after_abandoned := r.after_abandoned;
            UPDATE oncegate.records AS t SET
                    lease_until = claim.lease_until,
                    expires_at = claim.lease_until + claim.retention_ms,
                    purge_at = oncegate.purge_at(t.purge_at, claim.lease_until + claim.retention_ms, clock)
                WHERE t.id = claim.id;
            RETURN;
        END IF;
        IF is_live AND r.state = 'in-progress' AND claim.on_abandoned = 'park' THEN
            outcome := 'unknown';
            UPDATE oncegate.records AS t SET
                    state = 'unknown', attempt = NULL, lease_until = NULL, after_abandoned = NULL,
                    changed_at = clock,
                    expires_at = clock + claim.retention_ms,
                    purge_at = oncegate.purge_at(t.purge_at, clock + claim.retention_ms, clock)
                WHERE t.id = claim.id;
            RETURN;
        END IF;
        -- Free, past its retention, or abandoned and to be executed again: under a token greater than every one before.
        outcome := 'execute';
        token := greatest(r.token + 1, clock);
        attempts := CASE WHEN is_live THEN least(r.attempts + 1, 4294967295) ELSE 1 END;
        lease_until := clock + claim.lease_ms;
        after_abandoned := is_live AND r.state = 'in-progress';
        UPDATE oncegate.records AS t SET
                state = 'in-progress',
                fingerprint = claim.fingerprint,
                token = claim.token,
                attempts = claim.attempts,
                attempt = claim.attempt,
                lease_until = claim.lease_until,
                after_abandoned = claim.after_abandoned,
                caller = claim.caller,
                operation = claim.operation,
                created_at = CASE WHEN is_live THEN t.created_at ELSE clock END,
                changed_at = clock,
                expires_at = claim.lease_until + claim.retention_ms,
                purge_at = oncegate.purge_at(t.purge_at, claim.lease_until + claim.retention_ms, clock),
                response = NULL,
                step_names = CASE WHEN is_live THEN t.step_names END,
                step_results = CASE WHEN is_live THEN t.step_results END
            WHERE t.id = claim.id;
        RETURN;
    END LOOP;
    -- Purged and claimed again by others eight times meanwhile: somebody is at it.
    outcome := 'in-progress';
    lease_left_ms := 0;
END
$$;

-- Ends the attempt with what came of it, and says so. state: completed (with a response), awaited, tombstone, unknown.
-- Outcomes: completed, fenced, locked.
CREATE OR REPLACE FUNCTION oncegate.complete_if_owner(
    id bytea,
    token bigint,
    state text,
    response bytea,
    retention_ms bigint,
    OUT outcome text,
    OUT clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    r oncegate.records;
BEGIN
    IF complete_if_owner.state IS NULL OR complete_if_owner.state NOT IN ('completed', 'awaited', 'tombstone', 'unknown') THEN
        RAISE EXCEPTION 'oncegate: state must be completed, awaited, tombstone or unknown' USING ERRCODE = '22023';
    END IF;
    IF (complete_if_owner.state = 'completed') <> (complete_if_owner.response IS NOT NULL) THEN
        RAISE EXCEPTION 'oncegate: there is a response if and only if the state is completed' USING ERRCODE = '22023';
    END IF;
    IF complete_if_owner.response IS NOT NULL AND NOT oncegate.may_be_response(complete_if_owner.response) THEN
        RAISE EXCEPTION 'oncegate: the response is not in the published encoding' USING ERRCODE = '22023';
    END IF;
    IF (complete_if_owner.retention_ms BETWEEN 1 AND 34560000000) IS NOT TRUE THEN
        PERFORM oncegate.check_duration('retention_ms', complete_if_owner.retention_ms, 34560000000);
    END IF;
    clock := oncegate.now_ms();
    SELECT t.* INTO r FROM oncegate.records AS t
        WHERE t.id = complete_if_owner.id AND t.token = complete_if_owner.token AND complete_if_owner.clock < t.expires_at
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.records AS t
            WHERE t.id = complete_if_owner.id AND t.token = complete_if_owner.token
                AND complete_if_owner.clock < t.expires_at;
        outcome := CASE WHEN FOUND THEN 'locked' ELSE 'fenced' END; -- a stale owner never overwrites
        RETURN;
    END IF;
    IF r.state = 'in-progress'
        -- Unknown became known after all.
        OR r.state = 'unknown' AND complete_if_owner.state <> 'unknown'
        -- The answer that the owner's own transaction left out, added once.
        OR r.state = 'awaited' AND complete_if_owner.state IN ('completed', 'tombstone')
    THEN
        outcome := 'completed';
        UPDATE oncegate.records AS t SET
                state = complete_if_owner.state,
                attempt = NULL, lease_until = NULL, after_abandoned = NULL,
                response = complete_if_owner.response,
                step_names = CASE WHEN complete_if_owner.state = 'unknown' THEN t.step_names END,
                step_results = CASE WHEN complete_if_owner.state = 'unknown' THEN t.step_results END,
                changed_at = complete_if_owner.clock,
                expires_at = complete_if_owner.clock + complete_if_owner.retention_ms,
                purge_at = oncegate.purge_at(t.purge_at, complete_if_owner.clock + complete_if_owner.retention_ms,
                    complete_if_owner.clock)
            WHERE t.id = complete_if_owner.id;
        PERFORM oncegate.tell(complete_if_owner.id);
    ELSIF r.state = complete_if_owner.state AND r.response IS NOT DISTINCT FROM complete_if_owner.response THEN
        outcome := 'completed'; -- sent twice, it succeeds twice
    ELSE
        outcome := 'fenced';
    END IF;
END
$$;

-- Many completions in one statement and one transaction, answered in their order.
CREATE OR REPLACE FUNCTION oncegate.complete_many(
    ids bytea[], tokens bigint[], states text[], responses bytea[], retentions_ms bigint[]
) RETURNS TABLE (outcome text, clock bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    started bigint := oncegate.now_ms();
    completed bigint[];
BEGIN
    -- Most are the first end of an attempt that owns its record: these are written together. Everything else, also what
    -- complete_if_owner() would refuse, is left to it.
    WITH mine AS MATERIALIZED (
        SELECT a.*
        FROM unnest(ids, tokens, states, responses, retentions_ms) WITH ORDINALITY
            AS a (id, token, state, response, retention_ms, n)
        JOIN oncegate.records AS t ON t.id = a.id AND t.token = a.token
        WHERE t.state = 'in-progress' AND started < t.expires_at
            AND a.state IN ('completed', 'awaited', 'tombstone', 'unknown')
            AND (a.state = 'completed') = (a.response IS NOT NULL)
            AND (a.response IS NULL OR oncegate.may_be_response(a.response))
            AND a.retention_ms BETWEEN 1 AND 34560000000
        FOR UPDATE OF t SKIP LOCKED
    ), put AS (
        UPDATE oncegate.records AS t SET
                state = m.state,
                attempt = NULL, lease_until = NULL, after_abandoned = NULL,
                response = m.response,
                step_names = CASE WHEN m.state = 'unknown' THEN t.step_names END,
                step_results = CASE WHEN m.state = 'unknown' THEN t.step_results END,
                changed_at = started,
                expires_at = started + m.retention_ms,
                purge_at = oncegate.purge_at(t.purge_at, started + m.retention_ms, started)
            FROM mine AS m
            WHERE t.id = m.id
            RETURNING m.n, oncegate.tell(t.id)
    )
    SELECT array_agg(p.n) INTO completed FROM put AS p;

    FOR n IN 1..coalesce(array_length(ids, 1), 0) LOOP
        IF n = ANY (completed) THEN
            outcome := 'completed';
            clock := started;
            RETURN NEXT;
        ELSE
            RETURN QUERY SELECT c.* FROM oncegate.complete_if_owner(ids[n], tokens[n], states[n], responses[n],
                retentions_ms[n]) AS c;
        END IF;
    END LOOP;
END
$$;

-- An operator says what came of it. resolution: complete (with a response, or none to replay) or release. Outcomes:
-- resolved and not-resolvable, with the state before; locked.
CREATE OR REPLACE FUNCTION oncegate.resolve(
    id bytea,
    resolution text,
    response bytea,
    retention_ms bigint,
    force boolean,
    actor text,
    reason text,
    OUT outcome text,
    OUT state_before text,
    OUT clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    r oncegate.records;
    end_state text := CASE
        WHEN resolve.resolution = 'release' THEN 'released'
        WHEN resolve.resolution = 'complete' THEN CASE WHEN resolve.response IS NULL THEN 'tombstone' ELSE 'completed' END
    END;
    entry bigint;
    expiry bigint;
BEGIN
    IF end_state IS NULL OR end_state = 'released' AND resolve.response IS NOT NULL THEN
        RAISE EXCEPTION 'oncegate: resolution must be complete, or release without a response' USING ERRCODE = '22023';
    END IF;
    IF resolve.response IS NOT NULL AND NOT oncegate.is_response(resolve.response) THEN
        RAISE EXCEPTION 'oncegate: the response is not in the published encoding' USING ERRCODE = '22023';
    END IF;
    PERFORM oncegate.check_duration('retention_ms', resolve.retention_ms, 34560000000);
    clock := oncegate.now_ms();
    SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = resolve.id FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.records AS t WHERE t.id = resolve.id AND resolve.clock < t.expires_at;
        outcome := CASE WHEN FOUND THEN 'locked' ELSE 'not-resolvable' END;
        RETURN;
    END IF;
    IF clock >= r.expires_at THEN
        outcome := 'not-resolvable';
        RETURN;
    END IF;
    state_before := oncegate.state_name(r.state, r.lease_until, clock);
    IF NOT (state_before IN ('unknown', 'abandoned')
        OR state_before = 'in-progress' AND coalesce(resolve.force, false) AND end_state = 'released'
        -- Left half-way: what came of it is still to be said.
        OR state_before = 'released' AND r.step_names IS NOT NULL AND end_state <> 'released')
    THEN
        outcome := 'not-resolvable';
        RETURN;
    END IF;
    -- Finished steps are remembered for as long as they were to be.
    expiry := resolve.clock + resolve.retention_ms;
    IF end_state = 'released' AND r.step_names IS NOT NULL THEN
        expiry := greatest(expiry, r.expires_at);
    END IF;
    outcome := 'resolved';
    UPDATE oncegate.records AS t SET
            state = end_state, attempt = NULL, lease_until = NULL, after_abandoned = NULL,
            response = resolve.response,
            step_names = CASE WHEN end_state = 'released' THEN t.step_names END,
            step_results = CASE WHEN end_state = 'released' THEN t.step_results END,
            changed_at = resolve.clock,
            expires_at = expiry,
            purge_at = oncegate.purge_at(t.purge_at, expiry, resolve.clock)
        WHERE t.id = resolve.id;
    INSERT INTO oncegate.audit (at, id, state_before, state_after, actor, reason)
        VALUES (resolve.clock, resolve.id, resolve.state_before, end_state, resolve.actor, resolve.reason)
        RETURNING number INTO entry;
    -- The newest 100 000 are kept; entries that somebody else removes just now are left to him.
    DELETE FROM oncegate.audit AS a WHERE a.number IN (
        SELECT o.number FROM oncegate.audit AS o WHERE o.number <= entry - 100000 ORDER BY o.number LIMIT 100
        FOR UPDATE SKIP LOCKED);
    PERFORM oncegate.tell(resolve.id);
END
$$;

-- Ends the attempt and frees the key. Outcomes: released, fenced, locked.
CREATE OR REPLACE FUNCTION oncegate.release(
    id bytea,
    token bigint,
    retention_ms bigint,
    OUT outcome text,
    OUT clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    r oncegate.records;
    expiry bigint;
BEGIN
    PERFORM oncegate.check_duration('retention_ms', release.retention_ms, 34560000000);
    clock := oncegate.now_ms();
    SELECT t.* INTO r FROM oncegate.records AS t
        WHERE t.id = release.id AND t.token = release.token AND release.clock < t.expires_at
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.records AS t
            WHERE t.id = release.id AND t.token = release.token AND release.clock < t.expires_at;
        outcome := CASE WHEN FOUND THEN 'locked' ELSE 'fenced' END;
        RETURN;
    END IF;
    IF r.state IN ('in-progress', 'unknown') THEN
        outcome := 'released';
        -- The row stays, so that its token goes on growing; finished steps for as long as they were to be remembered.
        expiry := release.clock + release.retention_ms;
        IF r.step_names IS NOT NULL THEN
            expiry := greatest(expiry, r.expires_at);
        END IF;
        UPDATE oncegate.records AS t SET
                state = 'released', attempt = NULL, lease_until = NULL, after_abandoned = NULL,
                changed_at = release.clock,
                expires_at = expiry,
                purge_at = oncegate.purge_at(t.purge_at, expiry, release.clock)
            WHERE t.id = release.id;
        PERFORM oncegate.tell(release.id);
    ELSIF r.state = 'released' THEN
        outcome := 'released'; -- sent twice
    ELSE
        outcome := 'fenced';
    END IF;
END
$$;

-- Notes what an attempt has finished on its way: its step with this number, counted from 0. Outcomes: recorded; differs, where
-- another step has this number or one before it is missing; full; fenced; locked.
CREATE FUNCTION oncegate.step(
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
CREATE FUNCTION oncegate.steps(id bytea) RETURNS TABLE (token bigint, names text[], results bytea[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT t.token, t.step_names, t.step_results FROM oncegate.records AS t
        WHERE t.id = steps.id AND t.step_names IS NOT NULL AND oncegate.now_ms() < t.expires_at;
END
$$;

-- Lists records in the order of their identifiers: those with this name of a state, this caller, an operation that starts
-- like this, for so long in their state; null is any. Looks at 10 000 rows at the most and gives 8 MiB of responses and
-- steps, or one record; the steps themselves are for oncegate.steps. A last row without a state is no record: there is more after its id.
CREATE OR REPLACE FUNCTION oncegate.list(
    only_state text, only_caller bytea, operation_prefix text, min_age_ms bigint, after bytea, most integer
) RETURNS TABLE (
    id bytea, state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint,
    after_abandoned boolean, caller bytea, operation text, created_at bigint, changed_at bigint, expires_at bigint,
    response bytea, clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    r oncegate.records;
    last_id bytea := coalesce(list.after, '\x');
    seen integer := 0;
    given integer := 0;
    octets bigint := 0;
BEGIN
    clock := oncegate.now_ms();
    FOR r IN SELECT t.* FROM oncegate.records AS t WHERE t.id > last_id ORDER BY t.id LIMIT 10001 LOOP
        IF seen >= 10000 OR given >= least(greatest(coalesce(list.most, 100), 1), 1000) OR octets >= 8388608 THEN
            id := last_id;
            state := NULL; fingerprint := NULL; token := NULL; attempts := NULL; attempt := NULL; lease_until := NULL;
            after_abandoned := NULL; caller := NULL; operation := NULL; created_at := NULL; changed_at := NULL;
            expires_at := NULL; response := NULL;
            RETURN NEXT;
            RETURN;
        END IF;
        seen := seen + 1;
        last_id := r.id;
        CONTINUE WHEN list.clock >= r.expires_at
            OR list.only_state <> oncegate.state_name(r.state, r.lease_until, list.clock)
            OR list.only_caller <> r.caller
            OR NOT starts_with(r.operation, coalesce(list.operation_prefix, ''))
            OR greatest(list.clock - r.changed_at, 0) < coalesce(list.min_age_ms, 0);
        given := given + 1;
        octets := octets + coalesce(octet_length(r.response), 0)
            + CASE WHEN r.step_results IS NULL THEN 0
                ELSE (SELECT coalesce(sum(octet_length(s)), 0) FROM unnest(r.step_results) AS u (s)) END;
        id := r.id; state := r.state; fingerprint := r.fingerprint; token := r.token; attempts := r.attempts;
        attempt := r.attempt; lease_until := r.lease_until; after_abandoned := r.after_abandoned; caller := r.caller;
        operation := r.operation; created_at := r.created_at; changed_at := r.changed_at; expires_at := r.expires_at;
        response := r.response;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Reads a record with its steps, in one look; no row where its retention is over.
CREATE FUNCTION oncegate.lookup_with_steps(id bytea) RETURNS TABLE (
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

-- For a transaction that completes its record itself, before its end: with oncegate.complete_reserved, which inserts it once,
-- where claim and complete write it twice. Gives the number of the transaction where there is no record: nothing is
-- written, and until the transaction ends everybody else hears in-progress. Null where there is a record, or somebody else
-- is about to insert one: oncegate.claim says more.
--
-- First the lock, then a look with a snapshot that is younger than the lock: whoever had it before has committed by then.
-- Above READ COMMITTED the look may be older, and oncegate.complete_reserved finds the record with SQLSTATE 40001.
CREATE FUNCTION oncegate.reserve(id bytea) RETURNS bigint
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
CREATE FUNCTION oncegate.reserve_or_claim(
    id bytea,
    attempt bytea,
    fingerprint bytea,
    lease_ms bigint,
    retention_ms bigint,
    on_abandoned text DEFAULT 'park',
    caller bytea DEFAULT '\x0000000000000000',
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
CREATE FUNCTION oncegate.complete_reserved(
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
        AND octet_length(complete_reserved.caller) = 8 AND octet_length(complete_reserved.operation) <= 256
        AND complete_reserved.transaction > 0) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: an argument of complete_reserved is not what the contract says' USING ERRCODE = '22023';
    END IF;
    IF complete_reserved.transaction = txid_current() THEN
        -- The watch is looked at as oncegate.tell does it.
        INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, caller, operation, created_at, changed_at,
                expires_at, purge_at, response)
            VALUES (complete_reserved.id, 'completed', complete_reserved.fingerprint, clock, 1, complete_reserved.caller,
                complete_reserved.operation, clock, clock, clock + complete_reserved.retention_ms,
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
        INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, caller, operation, created_at, changed_at,
                expires_at, purge_at)
            VALUES (complete_reserved.id, 'unknown', complete_reserved.fingerprint, clock, 1, complete_reserved.caller,
                complete_reserved.operation, clock, clock, clock + complete_reserved.retention_ms,
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

-- Those who may complete may note a step, and insert what they completed; those who may look up a record may read its steps.
REVOKE ALL ON FUNCTION oncegate.step, oncegate.steps, oncegate.lookup_with_steps, oncegate.reserve,
    oncegate.reserve_or_claim, oncegate.complete_reserved FROM PUBLIC;
DO $$
DECLARE
    g record;
BEGIN
    FOR g IN
        SELECT n.name, pg_get_userbyid(a.grantee) AS grantee
        FROM (VALUES ('complete_if_owner', 'step'), ('lookup', 'steps'), ('lookup', 'lookup_with_steps'),
                ('complete', 'reserve'), ('complete', 'complete_reserved'), ('claim', 'reserve_or_claim'))
                AS n (like_that_of, name)
            JOIN pg_proc AS p ON p.pronamespace = 'oncegate'::regnamespace AND p.proname = n.like_that_of,
            aclexplode(p.proacl) AS a
        WHERE a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION oncegate.%I TO %I', g.name, g.grantee);
    END LOOP;
END
$$;

INSERT INTO oncegate.contract (version) VALUES (2);
