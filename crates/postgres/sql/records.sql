-- Records. Each function translates one arm of decide() (crates/core/src/decide.rs), which is the authority.
--
-- No call ever waits for the open transaction of another session:
--   * a call that changes nothing is answered from a plain read, without a lock;
--   * a row to be changed is locked with FOR UPDATE SKIP LOCKED; if another transaction holds it, a claim gets "in-progress" and
--     every other call gets "locked";
--   * before a row is inserted, the call tries a transaction-level advisory lock on its identifier, because a unique index would
--     make it wait for a concurrent insert. Correctness rests on the unique index alone.
--
-- Every function has a fixed search_path, or a body after RETURN. Such a body is bound to what it names when it is created, and
-- the planner can replace the call by it. `oncegate check` verifies that no body is bound to an object of another owner.

-- The only source of time.
CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;

CREATE OR REPLACE FUNCTION oncegate.contract_version() RETURNS integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT max(version) FROM oncegate.contract $$;

-- The operator's name of a state.
CREATE OR REPLACE FUNCTION oncegate.state_name(state text, lease_until bigint, clock bigint) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN state = 'in-progress' AND clock >= lease_until THEN 'abandoned'
    WHEN state = 'awaited' THEN 'tombstone'
    ELSE state
END;

-- The time at which a purge looks at a row: its expiry, rounded up to two seconds. A noted time in the future is kept, because
-- a change of an indexed column makes an update expensive, unless the row would stay more than an hour too long.
CREATE OR REPLACE FUNCTION oncegate.purge_at(noted bigint, expires_at bigint, clock bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN noted > clock AND noted <= expires_at + 3600000 THEN noted ELSE (expires_at + 1999) / 2000 * 2000 END;

CREATE OR REPLACE FUNCTION oncegate.check_duration(name text, value_ms bigint, most_ms bigint) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF value_ms IS NULL OR value_ms < 1 OR value_ms > most_ms THEN
        RAISE EXCEPTION 'oncegate: % must be from 1 to % milliseconds', name, most_ms USING ERRCODE = '22023';
    END IF;
END
$$;

-- Refuses bytes of another size. Callers compare the size themselves first, because a call costs more than a comparison.
CREATE OR REPLACE FUNCTION oncegate.check_size(name text, bytes bytea, size integer) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(bytes) = size) IS NOT TRUE THEN
        RAISE EXCEPTION 'oncegate: % must have % bytes', name, size USING ERRCODE = '22023';
    END IF;
    RETURN true;
END
$$;

-- Transactions that notify commit one after the other in the whole cluster, so only watched records are notified of. A watch is
-- an advisory lock in shared mode that the listening session holds. The session that ends an attempt tries the same lock in
-- exclusive mode, so it sees the watch without reading or writing anything.
CREATE OR REPLACE FUNCTION oncegate.watch_key(id bytea) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN hashtextextended(encode(id, 'hex'), 2003788899);

-- Notifies the sessions that watch a record. It never waits: the lock is tried and released in one expression, so that nothing
-- is left behind. It does nothing if oncegate.notify is 'off' (for transactions that are to be prepared), or if listeners leave
-- the queue of notifications half full: a full queue would fail the transaction.
CREATE OR REPLACE FUNCTION oncegate.notify_watchers(id bytea) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    key CONSTANT bigint := oncegate.watch_key(notify_watchers.id);
    is_watched boolean;
BEGIN
    is_watched := CASE WHEN pg_try_advisory_lock(key) THEN NOT pg_advisory_unlock(key) ELSE true END;
    IF is_watched AND current_setting('oncegate.notify', true) IS DISTINCT FROM 'off' AND pg_notification_queue_usage() < 0.5
    THEN
        PERFORM pg_notify('oncegate_1', encode(notify_watchers.id, 'hex'));
    END IF;
END
$$;

-- For a session that listens to oncegate_1: notifies it from now on when an attempt at one of these records ends. Returns the
-- records that are watched now; a missing one is changing at this moment. A watch ends with oncegate.unwatch, called as often
-- as oncegate.watch, or with the session. Each takes an entry in the server's lock table.
CREATE OR REPLACE FUNCTION oncegate.watch(ids bytea[]) RETURNS SETOF bytea
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT a.id FROM unnest(ids) AS a (id) WHERE CASE
    WHEN octet_length(a.id) = 32 OR oncegate.check_size('ids', a.id, 32) THEN pg_try_advisory_lock_shared(oncegate.watch_key(a.id))
END $$;

CREATE OR REPLACE FUNCTION oncegate.unwatch(ids bytea[]) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT pg_advisory_unlock_shared(oncegate.watch_key(a.id)) FROM unnest(ids) AS a (id) $$;

-- Requests permission to execute. Outcomes: execute, replay, in-progress, mismatch, unknown, unreplayable; locked if the same
-- attempt claims again while another transaction holds its record. caller: the tag of the caller. key_tag: the tag by which
-- operators find the key, or null.
CREATE OR REPLACE FUNCTION oncegate.claim(
    id bytea,
    attempt bytea,
    fingerprint bytea,
    lease_ms bigint,
    retention_ms bigint,
    on_abandoned text DEFAULT 'park',
    caller bytea DEFAULT decode('0000000000000000', 'hex'),
    operation text DEFAULT '',
    key_tag bytea DEFAULT NULL,
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
    longest_lease CONSTANT bigint := 3600000;
    -- The longest time that the lease of another attempt can have had. It matters if more than the longest lease is left,
    -- because the lease was granted before the server's clock was set back.
    bound bigint;
BEGIN
    IF (octet_length(claim.id) = 32 AND octet_length(claim.attempt) = 16 AND octet_length(claim.fingerprint) = 33
        AND octet_length(claim.caller) = 8) IS NOT TRUE
    THEN
        PERFORM oncegate.check_size('id', claim.id, 32), oncegate.check_size('attempt', claim.attempt, 16),
            oncegate.check_size('fingerprint', claim.fingerprint, 33), oncegate.check_size('caller', claim.caller, 8);
    END IF;
    IF claim.on_abandoned IS NULL OR claim.on_abandoned NOT IN ('park', 'reexecute', 'reconcile') THEN
        RAISE EXCEPTION 'oncegate: on_abandoned must be park, reexecute or reconcile' USING ERRCODE = '22023';
    END IF;
    IF octet_length(claim.key_tag) <> 8 THEN
        RAISE EXCEPTION 'oncegate: key_tag must have 8 bytes or be null' USING ERRCODE = '22023';
    END IF;
    IF claim.operation IS NULL OR octet_length(claim.operation) > 256 THEN
        RAISE EXCEPTION 'oncegate: operation must have at most 256 bytes' USING ERRCODE = '22023';
    END IF;
    IF (claim.lease_ms BETWEEN 1 AND 3600000 AND claim.retention_ms BETWEEN 1 AND 34560000000) IS NOT TRUE THEN
        PERFORM oncegate.check_duration('lease_ms', claim.lease_ms, 3600000);
        PERFORM oncegate.check_duration('retention_ms', claim.retention_ms, 34560000000);
    END IF;
    claim.clock := oncegate.now_ms();

    -- Each turn reads the row and decides. If it has to write, the next turn comes with the row's lock or the right to insert.
    -- A row that is purged or inserted in between costs one more turn.
    FOR turn IN 1..8 LOOP
        IF to_lock THEN
            SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = claim.id FOR UPDATE SKIP LOCKED;
            is_there := FOUND;
            IF NOT is_there THEN
                SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = claim.id;
                IF FOUND THEN
                    -- Another open transaction changes it, and its result is not known yet.
                    outcome := CASE WHEN r.attempt = claim.attempt THEN 'locked' ELSE 'in-progress' END;
                    lease_left_ms := greatest(coalesce(r.lease_until - clock, 0), 0);
                    RETURN;
                END IF;
                to_lock := false; -- it was purged just now
            END IF;
        ELSE
            SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = claim.id;
            is_there := FOUND;
        END IF;
        is_live := is_there AND clock < r.expires_at;

        IF is_live THEN
            -- A key that was released after some of its steps is not free for another request.
            IF (r.state <> 'released' OR r.step_names IS NOT NULL) AND r.fingerprint <> claim.fingerprint THEN
                IF get_byte(r.fingerprint, 0) <> get_byte(claim.fingerprint, 0) THEN
                    RAISE EXCEPTION 'oncegate: the fingerprint of the record has another version and cannot be compared'
                        USING ERRCODE = 'OG003';
                END IF;
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
                    bound := greatest(r.lease_until - r.changed_at, claim.lease_ms);
                    IF r.lease_until - clock <= greatest(longest_lease, bound) THEN
                        outcome := 'in-progress';
                        lease_left_ms := r.lease_until - clock;
                        RETURN;
                    END IF;
                END IF;
            ELSIF r.state <> 'released' THEN
                RAISE EXCEPTION 'oncegate: the record has a state that this contract does not know' USING ERRCODE = 'OG003';
            END IF;
        END IF;

        -- From here on the call writes.
        IF NOT is_there THEN
            IF NOT may_insert THEN
                IF NOT pg_try_advisory_xact_lock(hashtextextended(encode(claim.id, 'hex'), 1868784485)) THEN
                    outcome := 'in-progress'; -- another open transaction inserts it
                    lease_left_ms := 0;
                    RETURN;
                END IF;
                may_insert := true;
            END IF;
            INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, attempt, lease_until, after_abandoned,
                    caller, key_tag, operation, created_at, changed_at, expires_at, purge_at)
                VALUES (claim.id, 'in-progress', claim.fingerprint, clock, 1, claim.attempt, clock + claim.lease_ms, false,
                    claim.caller, claim.key_tag, claim.operation, clock, clock,
                    clock + claim.lease_ms + claim.retention_ms,
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
            CONTINUE; -- it was inserted before we got the lock; the unique index decides
        END IF;
        IF NOT to_lock THEN
            to_lock := true;
            CONTINUE;
        END IF;

        IF is_live AND r.state = 'in-progress' AND r.attempt = claim.attempt THEN
            -- The same claim, sent again because its reply was lost: it keeps its token.
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
        IF is_live AND r.state = 'in-progress' AND clock < r.lease_until THEN
            -- The owner may be alive: it keeps the record for the longest time that its lease can have had, counted from now.
            outcome := 'in-progress';
            lease_left_ms := bound;
            UPDATE oncegate.records AS t SET
                    lease_until = clock + claim.lease_left_ms,
                    changed_at = clock,
                    expires_at = t.expires_at - t.lease_until + clock + claim.lease_left_ms,
                    purge_at = oncegate.purge_at(t.purge_at, t.expires_at - t.lease_until + clock + claim.lease_left_ms, clock)
                WHERE t.id = claim.id;
            RETURN;
        END IF;
        IF is_live AND r.state = 'in-progress' AND claim.on_abandoned = 'park' THEN
            outcome := 'unknown';
            UPDATE oncegate.records AS t SET
                    state = 'unknown', attempt = NULL, lease_until = NULL, after_abandoned = NULL, by_operator = false,
                    changed_at = clock,
                    expires_at = clock + claim.retention_ms,
                    purge_at = oncegate.purge_at(t.purge_at, clock + claim.retention_ms, clock)
                WHERE t.id = claim.id;
            RETURN;
        END IF;
        -- The record is free, past its retention, or abandoned and to be executed again: grant a token greater than all before.
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
                key_tag = claim.key_tag,
                by_operator = false,
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
    -- The record was purged and claimed by other attempts eight times meanwhile.
    outcome := 'in-progress';
    lease_left_ms := 0;
END
$$;

-- Extends the lease. Outcomes: renewed, fenced, locked.
CREATE OR REPLACE FUNCTION oncegate.renew(
    id bytea,
    token bigint,
    lease_ms bigint,
    retention_ms bigint,
    OUT outcome text,
    OUT lease_until bigint,
    OUT clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(renew.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', renew.id, 32);
    END IF;
    PERFORM oncegate.check_duration('lease_ms', renew.lease_ms, 3600000);
    PERFORM oncegate.check_duration('retention_ms', renew.retention_ms, 34560000000);
    clock := oncegate.now_ms();
    -- Only the owner's own row is locked, so a stale owner blocks no other call.
    PERFORM FROM oncegate.records AS t
        WHERE t.id = renew.id AND t.token = renew.token AND t.state = 'in-progress' AND renew.clock < t.expires_at
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.records AS t
            WHERE t.id = renew.id AND t.token = renew.token AND t.state = 'in-progress' AND renew.clock < t.expires_at;
        outcome := CASE WHEN FOUND THEN 'locked' ELSE 'fenced' END;
        RETURN;
    END IF;
    outcome := 'renewed';
    lease_until := clock + renew.lease_ms;
    UPDATE oncegate.records AS t SET
            lease_until = renew.lease_until,
            expires_at = renew.lease_until + renew.retention_ms,
            purge_at = oncegate.purge_at(t.purge_at, renew.lease_until + renew.retention_ms, renew.clock)
        WHERE t.id = renew.id;
END
$$;

-- Records a finished step of an attempt under its number, counted from 0, so that the next attempt can go on after it.
-- Outcomes: recorded; differs, if another step has this number or an earlier step is missing; full; fenced; locked.
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
    bytes bigint;
BEGIN
    IF (octet_length(step.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', step.id, 32);
    END IF;
    IF (step.number >= 0 AND octet_length(step.name) BETWEEN 1 AND 255 AND octet_length(step.result) <= 1048576) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a step must have a number from 0, a name of 1 to 255 bytes, and a result of at most 1 MiB'
            USING ERRCODE = '22023';
    END IF;
    clock := oncegate.now_ms();
    -- Only the owner's own row is locked, so a stale owner blocks no other call.
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
        -- The same step, sent again because its reply was lost.
        outcome := CASE WHEN r.step_names[step.number + 1] = step.name AND r.step_results[step.number + 1] = step.result
            THEN 'recorded' ELSE 'differs' END;
        RETURN;
    ELSIF step.number > count THEN
        outcome := 'differs';
        RETURN;
    END IF;
    SELECT coalesce(sum(octet_length(s.name) + octet_length(s.result)), 0) INTO bytes
        FROM unnest(r.step_names, r.step_results) AS s (name, result);
    IF count >= 256 OR bytes + octet_length(step.name) + octet_length(step.result) > 1048576 THEN
        outcome := 'full';
        RETURN;
    END IF;
    outcome := 'recorded';
    UPDATE oncegate.records AS t SET
            step_names = array_append(t.step_names, step.name), step_results = array_append(t.step_results, step.result)
        WHERE t.id = step.id;
END
$$;

-- Ends the attempt with its outcome. state: completed (with a response), awaited, tombstone or unknown. Outcomes: completed,
-- fenced, locked.
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
    IF (octet_length(complete_if_owner.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', complete_if_owner.id, 32);
    END IF;
    IF complete_if_owner.state IS NULL OR complete_if_owner.state NOT IN ('completed', 'awaited', 'tombstone', 'unknown') THEN
        RAISE EXCEPTION 'oncegate: state must be completed, awaited, tombstone or unknown' USING ERRCODE = '22023';
    END IF;
    IF (complete_if_owner.state = 'completed') <> (complete_if_owner.response IS NOT NULL) THEN
        RAISE EXCEPTION 'oncegate: response must be given if state is completed, and only then' USING ERRCODE = '22023';
    END IF;
    IF complete_if_owner.response IS NOT NULL AND NOT oncegate.may_be_response(complete_if_owner.response) THEN
        RAISE EXCEPTION 'oncegate: response is not in the published encoding' USING ERRCODE = '22023';
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
        -- The owner of an unknown outcome reports it after all.
        OR r.state = 'unknown' AND complete_if_owner.state <> 'unknown'
        -- The owner's own transaction left the response out; it is added once.
        OR r.state = 'awaited' AND complete_if_owner.state IN ('completed', 'tombstone')
    THEN
        outcome := 'completed';
        UPDATE oncegate.records AS t SET
                state = complete_if_owner.state,
                attempt = NULL, lease_until = NULL, after_abandoned = NULL, by_operator = false,
                response = complete_if_owner.response,
                step_names = CASE WHEN complete_if_owner.state = 'unknown' THEN t.step_names END,
                step_results = CASE WHEN complete_if_owner.state = 'unknown' THEN t.step_results END,
                changed_at = complete_if_owner.clock,
                expires_at = complete_if_owner.clock + complete_if_owner.retention_ms,
                purge_at = oncegate.purge_at(t.purge_at, complete_if_owner.clock + complete_if_owner.retention_ms,
                    complete_if_owner.clock)
            WHERE t.id = complete_if_owner.id;
        PERFORM oncegate.notify_watchers(complete_if_owner.id);
    ELSIF r.state = complete_if_owner.state AND r.response IS NOT DISTINCT FROM complete_if_owner.response THEN
        outcome := 'completed'; -- the call was sent twice
    ELSE
        outcome := 'fenced';
    END IF;
END
$$;

-- For applications, inside their own transaction: ends the attempt, or raises, so that the whole transaction is rolled back. If
-- response is null, the sidecar adds the response. If retention_ms is null, the retention of the claim applies. OG001: the
-- token is stale, or the attempt has ended. OG002: another transaction holds the record and did not release it within a quarter
-- of a second.
--
-- Unlike complete_if_owner, it does not succeed twice. The effect is in the transaction. If the reply to COMMIT was lost and
-- the service runs the attempt again under the same token, the second transaction must not commit as well.
CREATE OR REPLACE FUNCTION oncegate.complete(
    id bytea,
    token bigint,
    response bytea DEFAULT NULL,
    retention_ms bigint DEFAULT NULL,
    tombstone boolean DEFAULT false
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    completion text;
    state_before text;
    claimed_ms bigint;
    end_state text := CASE
        WHEN complete.tombstone THEN 'tombstone' WHEN complete.response IS NULL THEN 'awaited' ELSE 'completed' END;
BEGIN
    IF (octet_length(complete.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', complete.id, 32);
    END IF;
    IF (coalesce(complete.retention_ms, 1) BETWEEN 1 AND 34560000000) IS NOT TRUE THEN
        PERFORM oncegate.check_duration('retention_ms', complete.retention_ms, 34560000000);
    END IF;
    IF complete.response IS NOT NULL AND (complete.tombstone OR NOT oncegate.is_response(complete.response)) THEN
        RAISE EXCEPTION 'oncegate: response is not in the published encoding, or was given with a tombstone'
            USING ERRCODE = '22023';
    END IF;
    -- A renewal that is being committed holds the row until it is flushed.
    FOR turn IN 0..6 LOOP
        SELECT t.state, t.expires_at - coalesce(t.lease_until, t.changed_at) INTO state_before, claimed_ms
            FROM oncegate.records AS t
            WHERE t.id = complete.id AND t.token = complete.token
            FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            completion := 'fenced';
            IF state_before IN ('in-progress', 'unknown') THEN
                SELECT c.outcome INTO completion FROM oncegate.complete_if_owner(
                    complete.id, complete.token, end_state, complete.response,
                    coalesce(complete.retention_ms, claimed_ms)) AS c;
            END IF;
        ELSE
            PERFORM FROM oncegate.records AS t WHERE t.id = complete.id AND t.token = complete.token;
            completion := CASE WHEN FOUND THEN 'locked' ELSE 'fenced' END;
        END IF;
        IF completion = 'completed' THEN
            RETURN;
        ELSIF completion = 'fenced' THEN
            RAISE EXCEPTION 'oncegate: the attempt no longer owns its record, so its effect must not take place'
                USING ERRCODE = 'OG001',
                    HINT = 'Roll back. Another attempt may be executing, or the operation was completed, perhaps by this attempt.';
        END IF;
        PERFORM pg_sleep(0.002 * (1 << turn));
    END LOOP;
    RAISE EXCEPTION 'oncegate: another transaction holds the record'
        USING ERRCODE = 'OG002', HINT = 'Roll back. Another transaction is completing the same attempt.';
END
$$;

-- Ends the attempt without an outcome and frees the key. Outcomes: released, fenced, locked.
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
    IF (octet_length(release.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', release.id, 32);
    END IF;
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
        -- The row stays, so that its token keeps growing. Finished steps keep their retention.
        expiry := release.clock + release.retention_ms;
        IF r.step_names IS NOT NULL THEN
            expiry := greatest(expiry, r.expires_at);
        END IF;
        UPDATE oncegate.records AS t SET
                state = 'released', attempt = NULL, lease_until = NULL, after_abandoned = NULL, by_operator = false,
                changed_at = release.clock,
                expires_at = expiry,
                purge_at = oncegate.purge_at(t.purge_at, expiry, release.clock)
            WHERE t.id = release.id;
        PERFORM oncegate.notify_watchers(release.id);
    ELSIF r.state = 'released' THEN
        outcome := 'released'; -- the call was sent twice
    ELSE
        outcome := 'fenced';
    END IF;
END
$$;

