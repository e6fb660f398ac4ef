-- Operators: resolving, rewriting, forgetting, reading, listing, counting and purging records.

-- Adds an entry to the audit trail. The newest 100 000 are kept. Entries that another transaction removes now are skipped.
CREATE OR REPLACE FUNCTION oncegate.add_audit(
    at bigint, id bytea, state_before text, state_after text, actor text, reason text
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry bigint;
BEGIN
    INSERT INTO oncegate.audit (at, id, state_before, state_after, actor, reason)
        VALUES (add_audit.at, add_audit.id, add_audit.state_before, add_audit.state_after, add_audit.actor, add_audit.reason)
        RETURNING number INTO entry;
    DELETE FROM oncegate.audit AS a WHERE a.number IN (
        SELECT o.number FROM oncegate.audit AS o WHERE o.number <= entry - 100000 ORDER BY o.number LIMIT 100
        FOR UPDATE SKIP LOCKED);
END
$$;

-- Applies an operator's decision. resolution: complete (with a response, or with null if there is none to replay), release, or
-- park, which makes the outcome unknown again, even if the owner released the record. force: release even if the lease still
-- runs. amend: replace only what an operator decided before. Outcomes: resolved and not-resolvable, with the state before;
-- locked.
CREATE OR REPLACE FUNCTION oncegate.resolve(
    id bytea,
    resolution text,
    response bytea,
    retention_ms bigint,
    force boolean,
    amend boolean,
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
        WHEN resolve.resolution = 'complete' THEN CASE WHEN resolve.response IS NULL THEN 'tombstone' ELSE 'completed' END
        WHEN resolve.resolution = 'release' THEN 'released'
        WHEN resolve.resolution = 'park' THEN 'unknown'
    END;
    may boolean;
    expiry bigint;
BEGIN
    IF (octet_length(resolve.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', resolve.id, 32);
    END IF;
    IF end_state IS NULL OR end_state IN ('released', 'unknown') AND resolve.response IS NOT NULL THEN
        RAISE EXCEPTION 'oncegate: resolution must be complete, or release or park without a response' USING ERRCODE = '22023';
    END IF;
    IF resolve.response IS NOT NULL AND NOT oncegate.is_response(resolve.response) THEN
        RAISE EXCEPTION 'oncegate: response is not in the published encoding' USING ERRCODE = '22023';
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
        -- A completion by the owner is final.
        WHEN end_state = 'unknown' THEN
            state_before = 'released' OR state_before IN ('completed', 'tombstone') AND r.by_operator
        WHEN coalesce(resolve.amend, false) THEN
            r.by_operator AND (state_before IN ('completed', 'tombstone') OR state_before = 'released' AND end_state <> 'released')
        ELSE state_before IN ('unknown', 'abandoned')
            OR state_before = 'in-progress' AND coalesce(resolve.force, false) AND end_state = 'released'
            -- Released after some of its steps: its outcome is still open.
            OR state_before = 'released' AND r.step_names IS NOT NULL AND end_state <> 'released'
    END;
    IF NOT may THEN
        outcome := 'not-resolvable';
        RETURN;
    END IF;
    -- Finished steps keep their retention, and parking a record never shortens its retention.
    expiry := resolve.clock + resolve.retention_ms;
    IF end_state = 'unknown' OR end_state = 'released' AND r.step_names IS NOT NULL THEN
        expiry := greatest(expiry, r.expires_at);
    END IF;
    outcome := 'resolved';
    -- The steps stay: the decision may be taken back, and the next attempt must not repeat finished steps. A parked record gets
    -- a new token without an owner, so that an owner that an operator fenced stays fenced.
    UPDATE oncegate.records AS t SET
            state = end_state, attempt = NULL, lease_until = NULL, after_abandoned = NULL, by_operator = true,
            token = CASE WHEN end_state = 'unknown' THEN greatest(t.token + 1, resolve.clock) ELSE t.token END,
            response = resolve.response,
            changed_at = resolve.clock,
            expires_at = expiry,
            purge_at = oncegate.purge_at(t.purge_at, expiry, resolve.clock)
        WHERE t.id = resolve.id;
    PERFORM oncegate.add_audit(
        resolve.clock, resolve.id, resolve.state_before, end_state, resolve.actor, resolve.reason);
    PERFORM oncegate.notify_watchers(resolve.id);
END
$$;

-- Replaces the content of a record by another form of it: the response, and the results of all steps in their order. The token and
-- every byte of the old content are compared, so a record that changed meanwhile is left alone. Null is no response, and no steps.
-- Nothing else of the record changes. Outcomes: rewritten, also if the record has the new content already; not-rewritten, with the
-- state; locked.
CREATE OR REPLACE FUNCTION oncegate.rewrite(
    id bytea,
    token bigint,
    old_response bytea,
    response bytea,
    old_step_results bytea[],
    step_results bytea[],
    OUT outcome text,
    OUT state_before text,
    OUT clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    r oncegate.records;
    none CONSTANT bytea[] := ARRAY[]::bytea[];
    old_results CONSTANT bytea[] := coalesce(rewrite.old_step_results, none);
    results CONSTANT bytea[] := coalesce(rewrite.step_results, none);
BEGIN
    IF (octet_length(rewrite.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', rewrite.id, 32);
    END IF;
    IF rewrite.token IS NULL OR (rewrite.old_response IS NULL) <> (rewrite.response IS NULL)
        OR coalesce(array_ndims(results), 1) <> 1 OR cardinality(old_results) <> cardinality(results)
        OR array_position(results, NULL) IS NOT NULL
    THEN
        RAISE EXCEPTION 'oncegate: the new content must have a response if the old content has one, and as many results of steps'
            USING ERRCODE = '22023';
    END IF;
    IF rewrite.response IS NOT NULL AND NOT oncegate.may_be_response(rewrite.response) THEN
        RAISE EXCEPTION 'oncegate: response is not in the published encoding' USING ERRCODE = '22023';
    END IF;
    clock := oncegate.now_ms();
    SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = rewrite.id FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.records AS t WHERE t.id = rewrite.id AND rewrite.clock < t.expires_at;
        outcome := CASE WHEN FOUND THEN 'locked' ELSE 'not-rewritten' END;
        RETURN;
    END IF;
    outcome := 'not-rewritten';
    IF clock >= r.expires_at THEN
        RETURN;
    END IF;
    state_before := oncegate.state_name(r.state, r.lease_until, clock);
    IF r.token <> rewrite.token THEN
        RETURN;
    END IF;
    IF r.response IS NOT DISTINCT FROM rewrite.response AND coalesce(r.step_results, none) = results THEN
        outcome := 'rewritten'; -- the call was sent twice
        RETURN;
    END IF;
    IF r.response IS DISTINCT FROM rewrite.old_response OR coalesce(r.step_results, none) <> old_results
        OR (SELECT coalesce(sum(octet_length(u.name)), 0) FROM unnest(r.step_names) AS u (name))
            + (SELECT coalesce(sum(octet_length(u.result)), 0) FROM unnest(results) AS u (result)) > 1048576
    THEN
        RETURN;
    END IF;
    outcome := 'rewritten';
    UPDATE oncegate.records AS t SET
            response = rewrite.response,
            step_results = CASE WHEN t.step_names IS NULL THEN NULL ELSE results END
        WHERE t.id = rewrite.id;
END
$$;

-- Removes the content of a completed record: the response and the steps. The record is a tombstone from then on, until the same
-- time as before, and its owner cannot add a response. Outcomes: forgotten and not-forgotten, with the state before; locked.
CREATE OR REPLACE FUNCTION oncegate.forget(
    id bytea,
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
BEGIN
    IF (octet_length(forget.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', forget.id, 32);
    END IF;
    IF forget.actor IS NULL OR forget.reason IS NULL THEN
        RAISE EXCEPTION 'oncegate: actor and reason must be given' USING ERRCODE = '22023';
    END IF;
    clock := oncegate.now_ms();
    SELECT t.* INTO r FROM oncegate.records AS t WHERE t.id = forget.id FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.records AS t WHERE t.id = forget.id AND forget.clock < t.expires_at;
        outcome := CASE WHEN FOUND THEN 'locked' ELSE 'not-forgotten' END;
        RETURN;
    END IF;
    outcome := 'not-forgotten';
    IF clock >= r.expires_at THEN
        RETURN;
    END IF;
    state_before := oncegate.state_name(r.state, r.lease_until, clock);
    IF r.state NOT IN ('completed', 'awaited', 'tombstone') OR r.state = 'tombstone' AND r.step_names IS NULL THEN
        RETURN;
    END IF;
    outcome := 'forgotten';
    -- An operator's completion with steps becomes final: if it were taken back, the next attempt would repeat the steps.
    UPDATE oncegate.records AS t SET
            state = 'tombstone', response = NULL, step_names = NULL, step_results = NULL,
            by_operator = t.by_operator AND t.step_names IS NULL,
            changed_at = forget.clock
        WHERE t.id = forget.id;
    PERFORM oncegate.add_audit(forget.clock, forget.id, forget.state_before, 'tombstone', forget.actor, forget.reason);
END
$$;

-- Reads a record; no row if there is none, or if its retention is over.
CREATE OR REPLACE FUNCTION oncegate.lookup(id bytea) RETURNS TABLE (
    state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint,
    after_abandoned boolean, caller bytea, key_tag bytea, operation text, created_at bigint, changed_at bigint,
    expires_at bigint, response bytea, step_names text[], step_results bytea[], by_operator boolean, clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(lookup.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', lookup.id, 32);
    END IF;
    clock := oncegate.now_ms();
    RETURN QUERY SELECT t.state, t.fingerprint, t.token, t.attempts, t.attempt, t.lease_until, t.after_abandoned, t.caller,
            t.key_tag, t.operation, t.created_at, t.changed_at, t.expires_at, t.response, t.step_names, t.step_results,
            t.by_operator, lookup.clock
        FROM oncegate.records AS t WHERE t.id = lookup.id AND lookup.clock < t.expires_at;
END
$$;

-- Lists records in the order of their identifiers. Filters, of which null matches every record: the operator's name of the
-- state, the tags of the caller and of the key, the beginning of the operation, and the time since the last change of state.
-- Reads at most 10 000 rows and returns at most 8 MiB of responses and steps, or one record. If the last row has no state, it
-- is not a record: there may be more records after its id.
CREATE OR REPLACE FUNCTION oncegate.list(
    only_state text, only_caller bytea, only_key_tag bytea, operation_prefix text, min_age_ms bigint, after bytea, max_rows integer
) RETURNS TABLE (
    id bytea, state text, fingerprint bytea, token bigint, attempts bigint, attempt bytea, lease_until bigint,
    after_abandoned boolean, caller bytea, key_tag bytea, operation text, created_at bigint, changed_at bigint,
    expires_at bigint, response bytea, step_names text[], step_results bytea[], by_operator boolean, clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    r oncegate.records;
    last_id bytea := coalesce(list.after, '');
    rows_read integer := 0;
    rows_returned integer := 0;
    bytes bigint := 0;
BEGIN
    clock := oncegate.now_ms();
    FOR r IN SELECT t.* FROM oncegate.records AS t WHERE t.id > last_id ORDER BY t.id LIMIT 10001 LOOP
        IF rows_read >= 10000 OR rows_returned >= least(greatest(coalesce(list.max_rows, 100), 1), 1000) OR bytes >= 8388608 THEN
            id := last_id;
            state := NULL; fingerprint := NULL; token := NULL; attempts := NULL; attempt := NULL; lease_until := NULL;
            after_abandoned := NULL; caller := NULL; key_tag := NULL; operation := NULL; created_at := NULL; changed_at := NULL;
            expires_at := NULL; response := NULL; step_names := NULL; step_results := NULL; by_operator := NULL;
            RETURN NEXT;
            RETURN;
        END IF;
        rows_read := rows_read + 1;
        last_id := r.id;
        CONTINUE WHEN list.clock >= r.expires_at
            OR list.only_state <> oncegate.state_name(r.state, r.lease_until, list.clock)
            OR list.only_caller <> r.caller
            OR list.only_key_tag IS NOT NULL AND list.only_key_tag IS DISTINCT FROM r.key_tag
            OR NOT starts_with(r.operation, coalesce(list.operation_prefix, ''))
            OR greatest(list.clock - r.changed_at, 0) < coalesce(list.min_age_ms, 0);
        rows_returned := rows_returned + 1;
        bytes := bytes + coalesce(octet_length(r.response), 0)
            + CASE WHEN r.step_results IS NULL THEN 0
                ELSE (SELECT coalesce(sum(octet_length(s)), 0) FROM unnest(r.step_results) AS u (s)) END;
        id := r.id; state := r.state; fingerprint := r.fingerprint; token := r.token; attempts := r.attempts;
        attempt := r.attempt; lease_until := r.lease_until; after_abandoned := r.after_abandoned; caller := r.caller;
        key_tag := r.key_tag; operation := r.operation; created_at := r.created_at; changed_at := r.changed_at;
        expires_at := r.expires_at; response := r.response; step_names := r.step_names; step_results := r.step_results;
        by_operator := r.by_operator;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Counts the records that match, and finds the first ones in the order of time. Filters, of which null matches every record: the
-- operator's names of the states, the tags of the caller and of the key, the beginning of the operation, the time since the last
-- change of state, that change from changed_since on and before changed_before, and identifiers after `after` up to `last`. The
-- record except_id, and operations that begin with except_prefix, are left out.
-- A row without an id is a number: of the records in this state, and of this operation if by_operation. All other rows are the
-- places of at most max_rows records, 1001 at most: the newest ones, or the oldest ones, beyond this time and identifier.
-- It reads every row in the range of identifiers, without responses. So callers bound its time by the range.
CREATE OR REPLACE FUNCTION oncegate.survey(
    only_states text[],
    only_caller bytea,
    only_key_tag bytea,
    operation_prefix text,
    min_age_ms bigint,
    changed_since bigint,
    changed_before bigint,
    except_id bytea,
    except_prefix text,
    after bytea,
    last bytea,
    by_operation boolean,
    oldest_first boolean,
    beyond_time bigint,
    beyond_id bytea,
    max_rows integer
) RETURNS TABLE (id bytea, changed_at bigint, state text, operation text, records bigint, clock bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    clock := oncegate.now_ms();
    -- Planned for these arguments: filters that are null cost nothing, and the whole table is not read by its index. Records in
    -- some states, or of one key, are few, so they are read once and kept. Of all records, two scans are cheaper than a copy.
    RETURN QUERY EXECUTE format($query$
        WITH matching AS %s (
            SELECT t.id, t.changed_at, CASE WHEN $14 THEN t.operation END AS operation,
                oncegate.state_name(t.state, t.lease_until, $1) AS state_name
            FROM oncegate.records AS t
            WHERE $1 < t.expires_at
                AND ($2 IS NULL OR oncegate.state_name(t.state, t.lease_until, $1) = ANY ($2))
                AND ($3 IS NULL OR t.caller = $3)
                AND ($4 IS NULL OR t.key_tag = $4)
                AND ($5 IS NULL OR starts_with(t.operation, $5))
                AND ($6 IS NULL OR $6 <= 0 OR t.changed_at <= $1 - $6)
                AND ($7 IS NULL OR t.changed_at >= $7)
                AND ($8 IS NULL OR t.changed_at < $8)
                AND ($9 IS NULL OR t.id <> $9)
                AND ($10 IS NULL OR NOT starts_with(t.operation, $10))
                AND ($11 IS NULL OR t.id > $11)
                AND ($12 IS NULL OR t.id <= $12)
        )
        SELECT NULL::bytea, NULL::bigint, m.state_name, m.operation, count(*), $1
        FROM matching AS m GROUP BY m.state_name, m.operation
        UNION ALL
        (SELECT m.id, m.changed_at, NULL::text, NULL::text, NULL::bigint, $1 FROM matching AS m
        WHERE $15 IS NULL OR CASE WHEN $13 THEN (m.changed_at, m.id) > ($15, $16) ELSE (m.changed_at, m.id) < ($15, $16) END
        ORDER BY CASE WHEN $13 THEN m.changed_at END, CASE WHEN $13 THEN m.id END,
            CASE WHEN NOT $13 THEN m.changed_at END DESC, CASE WHEN NOT $13 THEN m.id END DESC
        LIMIT $17)
        $query$, CASE WHEN survey.only_states IS NULL AND survey.only_key_tag IS NULL THEN 'NOT MATERIALIZED' ELSE 'MATERIALIZED' END)
        USING survey.clock, survey.only_states, survey.only_caller, survey.only_key_tag, survey.operation_prefix,
            survey.min_age_ms, survey.changed_since, survey.changed_before, survey.except_id, survey.except_prefix,
            survey.after, survey.last, coalesce(survey.oldest_first, false), coalesce(survey.by_operation, false),
            survey.beyond_time, survey.beyond_id, least(greatest(coalesce(survey.max_rows, 0), 0), 1001);
END
$$;

-- The purge_at from which a purge of a table starts: the end of the last purge. An hour after a purge last began at the first
-- row, about one of twenty calls begins there again, for rows that came late: their transaction stayed open past their expiry,
-- or the clock was behind when they were written. Not every call does, because under an old snapshot it may exceed the
-- statement timeout, and progress that is not committed is lost.
CREATE OR REPLACE FUNCTION oncegate.purge_from(name text, clock bigint) RETURNS bigint
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce((SELECT m.place FROM oncegate.purge_marks AS m
        WHERE m.name = purge_from.name AND m.place <= purge_from.clock
            AND (m.begun_at BETWEEN purge_from.clock - 3600000 AND purge_from.clock OR random() > 0.05)), 0)
$$;

-- Notes the progress of a purge of a table: the first row that is left, but no time in the future. It does not wait: if another
-- purge is noting its progress now, that is as good.
CREATE OR REPLACE FUNCTION oncegate.purge_reached(name text, clock bigint, began bigint, first_left bigint) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE oncegate.purge_marks AS m SET
            place = greatest(least(first_left, clock), began),
            begun_at = CASE WHEN began = 0 THEN clock ELSE m.begun_at END
        WHERE m.name = (SELECT k.name FROM oncegate.purge_marks AS k WHERE k.name = purge_reached.name FOR UPDATE SKIP LOCKED)
$$;

-- Removes at most max_rows rows whose retention is over, 1000 at most, and returns their number. Any number of purges may run
-- at the same time: each takes rows that no other holds.
CREATE OR REPLACE FUNCTION oncegate.purge(max_rows integer, OUT purged integer, OUT clock bigint)
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
    -- Rows that expire later than noted are noted again and do not count. One call handles at most ten batches of them.
    FOR turn IN 1..10 LOOP
        EXIT WHEN purged >= least(greatest(purge.max_rows, 0), 1000);
        WITH due AS (
            SELECT t.id, t.expires_at, t.purge_at FROM oncegate.records AS t
            WHERE t.purge_at >= place AND t.purge_at <= purge.clock
            ORDER BY t.purge_at
            LIMIT least(greatest(purge.max_rows, 0), 1000) - purge.purged
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
    IF purge.max_rows > 0 AND (began = 0 OR place > began) THEN
        PERFORM oncegate.purge_reached('records', clock, began, coalesce((SELECT t.purge_at FROM oncegate.records AS t
            WHERE t.purge_at >= began ORDER BY t.purge_at LIMIT 1), clock));
    END IF;
END
$$;

-- The audit trail, newest entry first, before this number.
CREATE OR REPLACE FUNCTION oncegate.audit_trail(before bigint, max_rows integer) RETURNS TABLE (
    number bigint, at bigint, id bytea, state_before text, state_after text, actor text, reason text
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT a.number, a.at, a.id, a.state_before, a.state_after, a.actor, a.reason FROM oncegate.audit AS a
    WHERE before IS NULL OR a.number < before
    ORDER BY a.number DESC LIMIT least(greatest(max_rows, 0), 1000)
$$;

