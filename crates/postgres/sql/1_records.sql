-- Records. Each function is the translation of one arm of decide() (crates/core/src/decide.rs), which stays the authority.
--
-- Nobody ever waits behind somebody else's open transaction:
--   * what changes nothing is answered from a plain read, without a lock;
--   * a row that is to be changed is taken with FOR UPDATE SKIP LOCKED; held by somebody, it is "in-progress" to a claim
--     and "locked" to everything else;
--   * before a row is inserted, a transaction-level advisory lock on its identifier is tried, because a unique index
--     would make us wait for a concurrent insert. Correctness rests on the unique index alone.
--
-- Every function has a fixed search_path or, for the planner to take its body in place of the call, a body after RETURN,
-- which is bound to what it names when it is made. `oncegate check` sees that none is bound to anything of others.

-- The one place where time comes from.
CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;

CREATE OR REPLACE FUNCTION oncegate.contract_version() RETURNS integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT max(version) FROM oncegate.contract $$;

-- What an operator calls the state.
CREATE OR REPLACE FUNCTION oncegate.state_name(state text, lease_until bigint, clock bigint) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN state = 'in-progress' AND clock >= lease_until THEN 'abandoned'
    WHEN state = 'awaited' THEN 'tombstone'
    ELSE state
END;

-- When a purge looks at a row: in steps of two seconds, at its expiry or after it. A value that is still ahead is kept,
-- because to change an indexed column is what makes an update dear, unless the row would stay for an hour too long.
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

-- Transactions that notify commit one after the other in the whole cluster. So only a record that somebody watches is
-- notified of, and a watch is seen without reading or writing anything: it is an advisory lock in shared mode that the
-- listening session holds, and whoever ends an attempt tries the same lock for himself.
CREATE OR REPLACE FUNCTION oncegate.watch_key(id bytea) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN hashtextextended(encode(id, 'hex'), 2003788899);

-- Tells whoever watches. Never waits: the lock is tried, and let go of in the same expression, so that nothing stays
-- behind. Says nothing where the database does not want it (oncegate.notify = 'off', for transactions that are to be
-- prepared), or where listeners leave notifications lie: a full queue would fail the transaction.
CREATE OR REPLACE FUNCTION oncegate.tell(id bytea) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    key CONSTANT bigint := oncegate.watch_key(tell.id);
    is_watched boolean;
BEGIN
    is_watched := CASE WHEN pg_try_advisory_lock(key) THEN NOT pg_advisory_unlock(key) ELSE true END;
    IF is_watched AND current_setting('oncegate.notify', true) IS DISTINCT FROM 'off' AND pg_notification_queue_usage() < 0.5
    THEN
        PERFORM pg_notify('oncegate_1', encode(tell.id, 'hex'));
    END IF;
END
$$;

-- For a session that listens to oncegate_1: from now on it is told when an attempt at one of these records ends. Gives
-- those that are watched now; one that is not among them is changing at this moment. Until oncegate.unwatch, as often as
-- it was watched, or the end of the session. Each takes a place in the server's table of locks.
CREATE OR REPLACE FUNCTION oncegate.watch(ids bytea[]) RETURNS SETOF bytea
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT a.id FROM unnest(ids) AS a (id) WHERE pg_try_advisory_lock_shared(oncegate.watch_key(a.id)) $$;

CREATE OR REPLACE FUNCTION oncegate.unwatch(ids bytea[]) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT pg_advisory_unlock_shared(oncegate.watch_key(a.id)) FROM unnest(ids) AS a (id) $$;

-- The tag of the key, where it follows the mark of the caller.
CREATE OR REPLACE FUNCTION oncegate.key_tag(caller bytea) RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN octet_length(caller) = 16 THEN substr(caller, 9, 8) END;

-- Asks to execute. Outcomes: execute, replay, in-progress, mismatch, unknown, unreplayable; locked where the same attempt
-- claims again while somebody holds its record. caller: the mark of the caller, 8 octets, and if its key is to be found by an
-- operator, the tag of the key after it. They are one argument, so that the function is the one that earlier programs call.
CREATE OR REPLACE FUNCTION oncegate.claim(
    id bytea,
    attempt bytea,
    fingerprint bytea,
    lease_ms bigint,
    retention_ms bigint,
    on_abandoned text DEFAULT 'park',
    caller bytea DEFAULT decode('0000000000000000', 'hex'),
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
    -- No lease is longer.
    longest CONSTANT bigint := 3600000;
    -- How long the lease of another attempt can have been, where more than the longest one is left of it, because it was given
    -- before the clock of the server was set back.
    bound bigint;
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
    IF claim.caller IS NULL OR octet_length(claim.caller) NOT IN (8, 16) THEN
        RAISE EXCEPTION 'oncegate: caller must have 8 octets, or 16 with the tag of the key' USING ERRCODE = '22023';
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
                IF get_byte(r.fingerprint, 0) <> get_byte(claim.fingerprint, 0) THEN
                    RAISE EXCEPTION 'oncegate: the fingerprint of a record is of another version and cannot be compared'
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
                    IF r.lease_until - clock <= greatest(longest, bound) THEN
                        outcome := 'in-progress';
                        lease_left_ms := r.lease_until - clock;
                        RETURN;
                    END IF;
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
                    caller, key_tag, operation, created_at, changed_at, expires_at, purge_at)
                VALUES (claim.id, 'in-progress', claim.fingerprint, clock, 1, claim.attempt, clock + claim.lease_ms, false,
                    substr(claim.caller, 1, 8), oncegate.key_tag(claim.caller), claim.operation, clock, clock, clock + claim.lease_ms + claim.retention_ms,
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
        IF is_live AND r.state = 'in-progress' AND clock < r.lease_until THEN
            -- Its owner may be alive: it keeps the record for as long as its lease can have been, from now on.
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
                caller = substr(claim.caller, 1, 8),
                key_tag = oncegate.key_tag(claim.caller),
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
    -- Purged and claimed again by others eight times meanwhile: somebody is at it.
    outcome := 'in-progress';
    lease_left_ms := 0;
END
$$;

-- Keeps the ownership. Outcomes: renewed, fenced, locked.
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
    PERFORM oncegate.check_duration('lease_ms', renew.lease_ms, 3600000);
    PERFORM oncegate.check_duration('retention_ms', renew.retention_ms, 34560000000);
    clock := oncegate.now_ms();
    -- Only a row that is the sender's own is ever locked, so that a stale owner is in nobody's way.
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
                attempt = NULL, lease_until = NULL, after_abandoned = NULL, by_operator = false,
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

-- For applications, inside their own transaction: ends the attempt, or raises, so that everything else that the
-- transaction wrote is rolled back. Without a response, the sidecar adds it; without a retention, it is that of the claim.
-- OG001: the token is stale, or the attempt has ended. OG002: another transaction holds the record and did not let go of it
-- within a quarter of a second.
--
-- Unlike complete_if_owner it does not succeed twice: the effect is in the transaction, and an attempt that a service runs
-- again under the same token, because the answer to its COMMIT was lost, must not commit beside itself.
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
    said text;
    state_before text;
    claimed_ms bigint;
    end_state text := CASE
        WHEN complete.tombstone THEN 'tombstone' WHEN complete.response IS NULL THEN 'awaited' ELSE 'completed' END;
BEGIN
    IF complete.response IS NOT NULL AND (complete.tombstone OR NOT oncegate.is_response(complete.response)) THEN
        RAISE EXCEPTION 'oncegate: the response is not in the published encoding, or goes with a tombstone'
            USING ERRCODE = '22023';
    END IF;
    -- A renewal that is just being committed holds the row for as long as one flush takes.
    FOR turn IN 0..6 LOOP
        SELECT t.state, t.expires_at - coalesce(t.lease_until, t.changed_at) INTO state_before, claimed_ms
            FROM oncegate.records AS t
            WHERE t.id = complete.id AND t.token = complete.token
            FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            said := 'fenced';
            IF state_before IN ('in-progress', 'unknown') THEN
                SELECT c.outcome INTO said FROM oncegate.complete_if_owner(
                    complete.id, complete.token, end_state, complete.response,
                    coalesce(complete.retention_ms, claimed_ms)) AS c;
            END IF;
        ELSE
            PERFORM FROM oncegate.records AS t WHERE t.id = complete.id AND t.token = complete.token;
            said := CASE WHEN FOUND THEN 'locked' ELSE 'fenced' END;
        END IF;
        IF said = 'completed' THEN
            RETURN;
        ELSIF said = 'fenced' THEN
            RAISE EXCEPTION 'oncegate: the attempt does not own its record any more, and its effect must not take place'
                USING ERRCODE = 'OG001',
                    HINT = 'Roll back. Another attempt may be executing, or it has been executed, perhaps by this attempt.';
        END IF;
        PERFORM pg_sleep(0.002 * (1 << turn));
    END LOOP;
    RAISE EXCEPTION 'oncegate: another transaction holds the record'
        USING ERRCODE = 'OG002', HINT = 'Roll back. Another transaction is completing the same attempt.';
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
                state = 'released', attempt = NULL, lease_until = NULL, after_abandoned = NULL, by_operator = false,
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

-- An operator says what came of it. resolution: complete (with a response, or none to replay) or release; amend-complete or
-- amend-release to replace what an operator said before, and nothing else; park to make it unknown again, also where its owner
-- released it. Outcomes: resolved and not-resolvable, with the state before; locked.
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
        WHEN resolve.resolution IN ('release', 'amend-release') THEN 'released'
        WHEN resolve.resolution IN ('complete', 'amend-complete')
            THEN CASE WHEN resolve.response IS NULL THEN 'tombstone' ELSE 'completed' END
        WHEN resolve.resolution = 'park' THEN 'unknown'
    END;
    amend CONSTANT boolean := starts_with(resolve.resolution, 'amend-');
    may boolean;
    entry bigint;
    expiry bigint;
BEGIN
    IF end_state IS NULL OR end_state IN ('released', 'unknown') AND resolve.response IS NOT NULL THEN
        RAISE EXCEPTION 'oncegate: resolution must be complete or amend-complete, or without a response release, amend-release or park'
            USING ERRCODE = '22023';
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
    may := CASE
        -- What its owner completed never changes.
        WHEN end_state = 'unknown' THEN
            state_before = 'released' OR state_before IN ('completed', 'tombstone') AND r.by_operator
        WHEN amend THEN
            r.by_operator AND (state_before IN ('completed', 'tombstone') OR state_before = 'released' AND end_state <> 'released')
        ELSE state_before IN ('unknown', 'abandoned')
            OR state_before = 'in-progress' AND coalesce(resolve.force, false) AND end_state = 'released'
            -- Left half-way: what came of it is still to be said.
            OR state_before = 'released' AND r.step_names IS NOT NULL AND end_state <> 'released'
    END;
    IF NOT may THEN
        outcome := 'not-resolvable';
        RETURN;
    END IF;
    -- Finished steps are remembered for as long as they were to be, and what is parked executes no sooner than before.
    expiry := resolve.clock + resolve.retention_ms;
    IF end_state = 'unknown' OR end_state = 'released' AND r.step_names IS NOT NULL THEN
        expiry := greatest(expiry, r.expires_at);
    END IF;
    outcome := 'resolved';
    -- The steps stay: an operator's answer may be taken back, and the next attempt must not begin again at the first. What is
    -- parked gets a token that nobody owns, so that whoever an operator has fenced stays fenced.
    UPDATE oncegate.records AS t SET
            state = end_state, attempt = NULL, lease_until = NULL, after_abandoned = NULL, by_operator = true,
            token = CASE WHEN end_state = 'unknown' THEN greatest(t.token + 1, resolve.clock) ELSE t.token END,
            response = resolve.response,
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

-- Reads a record; no row where its retention is over.
CREATE OR REPLACE FUNCTION oncegate.lookup(id bytea) RETURNS TABLE (
    state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint,
    after_abandoned boolean, caller bytea, operation text, created_at bigint, changed_at bigint, expires_at bigint,
    response bytea, clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    clock := oncegate.now_ms();
    RETURN QUERY SELECT t.state, t.fingerprint, t.token, t.attempts, t.attempt, t.lease_until, t.after_abandoned, t.caller,
            t.operation, t.created_at, t.changed_at, t.expires_at, t.response, lookup.clock
        FROM oncegate.records AS t WHERE t.id = lookup.id AND lookup.clock < t.expires_at;
END
$$;

-- Lists records in the order of their identifiers, with their steps: those with this name of a state, this caller, this tag of a
-- key, an operation that starts like this, for so long in their state; null is any. Looks at 10 000 rows at the most and gives
-- 8 MiB of responses and steps, or one record. A last row without a state is no record: there is more after its id.
CREATE OR REPLACE FUNCTION oncegate.list_records(
    only_state text, only_caller bytea, only_key bytea, operation_prefix text, min_age_ms bigint, after bytea, most integer
) RETURNS TABLE (
    id bytea, state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint,
    after_abandoned boolean, caller bytea, operation text, created_at bigint, changed_at bigint, expires_at bigint,
    response bytea, clock bigint, names text[], results bytea[], key_tag bytea, by_operator boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    r oncegate.records;
    last_id bytea := coalesce(list_records.after, '');
    seen integer := 0;
    given integer := 0;
    octets bigint := 0;
BEGIN
    clock := oncegate.now_ms();
    FOR r IN SELECT t.* FROM oncegate.records AS t WHERE t.id > last_id ORDER BY t.id LIMIT 10001 LOOP
        IF seen >= 10000 OR given >= least(greatest(coalesce(list_records.most, 100), 1), 1000) OR octets >= 8388608 THEN
            id := last_id;
            state := NULL; fingerprint := NULL; token := NULL; attempts := NULL; attempt := NULL; lease_until := NULL;
            after_abandoned := NULL; caller := NULL; operation := NULL; created_at := NULL; changed_at := NULL;
            expires_at := NULL; response := NULL; names := NULL; results := NULL; key_tag := NULL; by_operator := NULL;
            RETURN NEXT;
            RETURN;
        END IF;
        seen := seen + 1;
        last_id := r.id;
        CONTINUE WHEN list_records.clock >= r.expires_at
            OR list_records.only_state <> oncegate.state_name(r.state, r.lease_until, list_records.clock)
            OR list_records.only_caller <> r.caller
            OR list_records.only_key IS NOT NULL AND list_records.only_key IS DISTINCT FROM r.key_tag
            OR NOT starts_with(r.operation, coalesce(list_records.operation_prefix, ''))
            OR greatest(list_records.clock - r.changed_at, 0) < coalesce(list_records.min_age_ms, 0);
        given := given + 1;
        octets := octets + coalesce(octet_length(r.response), 0)
            + CASE WHEN r.step_results IS NULL THEN 0
                ELSE (SELECT coalesce(sum(octet_length(s)), 0) FROM unnest(r.step_results) AS u (s)) END;
        id := r.id; state := r.state; fingerprint := r.fingerprint; token := r.token; attempts := r.attempts;
        attempt := r.attempt; lease_until := r.lease_until; after_abandoned := r.after_abandoned; caller := r.caller;
        operation := r.operation; created_at := r.created_at; changed_at := r.changed_at; expires_at := r.expires_at;
        response := r.response; names := r.step_names; results := r.step_results; key_tag := r.key_tag;
        by_operator := r.by_operator;
        RETURN NEXT;
    END LOOP;
END
$$;

-- The same for programs of versions 1 to 4, without the filter by key and without steps.
CREATE OR REPLACE FUNCTION oncegate.list(
    only_state text, only_caller bytea, operation_prefix text, min_age_ms bigint, after bytea, most integer
) RETURNS TABLE (
    id bytea, state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint,
    after_abandoned boolean, caller bytea, operation text, created_at bigint, changed_at bigint, expires_at bigint,
    response bytea, clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT l.id, l.state, l.fingerprint, l.token, l.attempts, l.attempt, l.lease_until, l.after_abandoned, l.caller,
            l.operation, l.created_at, l.changed_at, l.expires_at, l.response, l.clock
        FROM oncegate.list_records(only_state, only_caller, NULL, operation_prefix, min_age_ms, after, most) AS l;
END
$$;

-- Where a purge of a table begins: where the last one got to; and, for rows that came late, at the first row again, in about one
-- of twenty calls after an hour. Not in each call then: under an old snapshot it may take longer than a statement may, and what
-- is not committed is not noted. Late is a row whose transaction was open until after its expiry, or that was written while the
-- clock was behind.
CREATE OR REPLACE FUNCTION oncegate.purge_from(name text, clock bigint) RETURNS bigint
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT m.place FROM oncegate.purge_marks AS m
        WHERE m.name = purge_from.name AND m.place <= purge_from.clock
            AND (m.begun_at BETWEEN purge_from.clock - 3600000 AND purge_from.clock OR random() > 0.05)), 0)
$$;

-- Notes how far a purge of a table got: to the first row that is left, but not into the future. Waits for nobody: where
-- another purge is just noting it, its word is as good.
CREATE OR REPLACE FUNCTION oncegate.purge_reached(name text, clock bigint, began bigint, first_left bigint) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE oncegate.purge_marks AS m SET
            place = greatest(least(first_left, clock), began),
            begun_at = CASE WHEN began = 0 THEN clock ELSE m.begun_at END
        WHERE m.name = (SELECT k.name FROM oncegate.purge_marks AS k WHERE k.name = purge_reached.name FOR UPDATE SKIP LOCKED)
$$;

-- Removes at most so many rows whose retention is over, and says how many. Any number of reapers may run at once: each
-- takes rows that no other holds.
CREATE OR REPLACE FUNCTION oncegate.purge(most integer, OUT purged integer, OUT clock bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    began bigint;
    place bigint;
    gone integer;
    moved integer;
BEGIN
    purged := 0;
    clock := oncegate.now_ms();
    began := oncegate.purge_from('records', clock);
    place := began;
    -- Rows that live longer than they were noted for are noted again and do not count; ten batches of them are enough for
    -- one call.
    FOR turn IN 1..10 LOOP
        EXIT WHEN purged >= least(greatest(purge.most, 0), 1000);
        WITH due AS (
            SELECT t.id, t.expires_at, t.purge_at FROM oncegate.records AS t
            WHERE t.purge_at >= place AND t.purge_at <= purge.clock
            ORDER BY t.purge_at
            LIMIT least(greatest(purge.most, 0), 1000) - purge.purged
            FOR UPDATE SKIP LOCKED
        ), deleted AS (
            DELETE FROM oncegate.records AS t USING due
            WHERE t.id = due.id AND due.expires_at <= purge.clock
            RETURNING 1
        ), noted AS (
            UPDATE oncegate.records AS t SET purge_at = oncegate.purge_at(0, t.expires_at, purge.clock) FROM due
            WHERE t.id = due.id AND due.expires_at > purge.clock
            RETURNING 1
        )
        SELECT (SELECT count(*) FROM deleted), (SELECT count(*) FROM noted), coalesce((SELECT max(due.purge_at) FROM due), place)
            INTO gone, moved, place;
        purged := purged + gone;
        EXIT WHEN gone + moved = 0;
    END LOOP;
    IF purge.most > 0 AND (began = 0 OR place > began) THEN
        PERFORM oncegate.purge_reached('records', clock, began, coalesce((SELECT t.purge_at FROM oncegate.records AS t
            WHERE t.purge_at >= began ORDER BY t.purge_at LIMIT 1), clock));
    END IF;
END
$$;

-- Removes one record if its retention is over. Outcomes: purged, kept, locked.
CREATE OR REPLACE FUNCTION oncegate.purge_one(id bytea, OUT outcome text, OUT clock bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    clock := oncegate.now_ms();
    PERFORM FROM oncegate.records AS t WHERE t.id = purge_one.id AND t.expires_at <= purge_one.clock FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        DELETE FROM oncegate.records AS t WHERE t.id = purge_one.id;
        outcome := 'purged';
        RETURN;
    END IF;
    PERFORM FROM oncegate.records AS t WHERE t.id = purge_one.id AND t.expires_at <= purge_one.clock;
    outcome := CASE WHEN FOUND THEN 'locked' ELSE 'kept' END;
END
$$;

-- The audit trail, newest first, from before this number.
CREATE OR REPLACE FUNCTION oncegate.audit_trail(before bigint, most integer) RETURNS TABLE (
    number bigint, at bigint, id bytea, state_before text, state_after text, actor text, reason text
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT a.number, a.at, a.id, a.state_before, a.state_after, a.actor, a.reason FROM oncegate.audit AS a
    WHERE before IS NULL OR a.number < before
    ORDER BY a.number DESC LIMIT least(greatest(most, 0), 1000)
$$;

-- Many claims in one statement and one transaction, answered in their order.
CREATE OR REPLACE FUNCTION oncegate.claim_many(
    ids bytea[], attempt_ids bytea[], fingerprints bytea[], leases_ms bigint[], retentions_ms bigint[],
    on_abandoned text[], callers bytea[], operations text[]
) RETURNS TABLE (
    outcome text, token bigint, attempts bigint, lease_until bigint, after_abandoned boolean, lease_left_ms bigint,
    response bytea, clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    started bigint := oncegate.now_ms();
    responses_size bigint := 0;
    inserted bigint[];
BEGIN
    -- Most claims are the first of their record: these are inserted together. What claim() would refuse is left to it.
    WITH asked AS MATERIALIZED (
        SELECT a.* FROM unnest(ids, attempt_ids, fingerprints, leases_ms, retentions_ms, claim_many.on_abandoned, callers,
            operations) WITH ORDINALITY AS a (id, attempt, fingerprint, lease_ms, retention_ms, policy, caller, operation, n)
        WHERE octet_length(a.id) = 32 AND octet_length(a.attempt) = 16 AND octet_length(a.fingerprint) = 33
            AND a.lease_ms BETWEEN 1 AND 3600000 AND a.retention_ms BETWEEN 1 AND 34560000000
            AND a.policy IN ('park', 'reexecute', 'reconcile')
            AND octet_length(a.caller) IN (8, 16) AND octet_length(a.operation) <= 256
            AND NOT EXISTS (SELECT FROM oncegate.records AS t WHERE t.id = a.id)
    ), mine AS MATERIALIZED (
        SELECT DISTINCT ON (a.id) a.* FROM asked AS a
        WHERE pg_try_advisory_xact_lock(hashtextextended(encode(a.id, 'hex'), 1868784485))
        ORDER BY a.id, a.n
    ), put AS (
        INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, attempt, lease_until, after_abandoned,
                caller, key_tag, operation, created_at, changed_at, expires_at, purge_at)
            SELECT m.id, 'in-progress', m.fingerprint, started, 1, m.attempt, started + m.lease_ms, false,
                substr(m.caller, 1, 8), oncegate.key_tag(m.caller), m.operation, started, started, started + m.lease_ms + m.retention_ms,
                oncegate.purge_at(0, started + m.lease_ms + m.retention_ms, started)
            FROM mine AS m
            ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING
            RETURNING t.id
    )
    SELECT array_agg(m.n) INTO inserted FROM put AS p JOIN mine AS m ON m.id = p.id;

    FOR n IN 1..coalesce(array_length(ids, 1), 0) LOOP
        IF n = ANY (inserted) THEN
            outcome := 'execute';
            token := started;
            attempts := 1;
            lease_until := started + leases_ms[n];
            after_abandoned := false;
            lease_left_ms := NULL;
            response := NULL;
            clock := started;
            RETURN NEXT;
        ELSIF responses_size >= 8388608 THEN
            -- One statement's responses are as large as they may be. Nothing was done: ask again, in another one.
            outcome := 'later';
            token := NULL;
            attempts := NULL;
            lease_until := NULL;
            after_abandoned := NULL;
            lease_left_ms := NULL;
            response := NULL;
            clock := started;
            RETURN NEXT;
        ELSE
            SELECT c.* INTO outcome, token, attempts, lease_until, after_abandoned, lease_left_ms, response, clock
                FROM oncegate.claim(ids[n], attempt_ids[n], fingerprints[n], leases_ms[n], retentions_ms[n],
                    claim_many.on_abandoned[n], callers[n], operations[n]) AS c;
            responses_size := responses_size + coalesce(octet_length(response), 0);
            RETURN NEXT;
        END IF;
    END LOOP;
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
