-- Batches of claims and completions.

-- Many claims in one statement and one transaction. Returns a row for each, in their order.
CREATE OR REPLACE FUNCTION oncegate.claim_many(
    ids bytea[], attempt_ids bytea[], fingerprints bytea[], leases_ms bigint[], retentions_ms bigint[],
    on_abandoned text[], callers bytea[], operations text[],
    key_tags bytea[] DEFAULT NULL
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
    -- Most claims are the first of their record: they are inserted together. Everything that claim() would refuse is left to
    -- it.
    WITH asked AS MATERIALIZED (
        SELECT a.* FROM unnest(ids, attempt_ids, fingerprints, leases_ms, retentions_ms, claim_many.on_abandoned, callers,
            operations, key_tags)
            WITH ORDINALITY AS a (id, attempt, fingerprint, lease_ms, retention_ms, policy, caller, operation, key_tag, n)
        WHERE octet_length(a.id) = 32 AND octet_length(a.attempt) = 16 AND octet_length(a.fingerprint) = 33
            AND a.lease_ms BETWEEN 1 AND 3600000 AND a.retention_ms BETWEEN 1 AND 34560000000
            AND a.policy IN ('park', 'reexecute', 'reconcile')
            AND octet_length(a.caller) = 8 AND octet_length(a.operation) <= 256 AND coalesce(octet_length(a.key_tag), 8) = 8
            AND NOT EXISTS (SELECT FROM oncegate.records AS t WHERE t.id = a.id)
    ), mine AS MATERIALIZED (
        SELECT DISTINCT ON (a.id) a.* FROM asked AS a
        WHERE pg_try_advisory_xact_lock(hashtextextended(encode(a.id, 'hex'), 1868784485))
        ORDER BY a.id, a.n
    ), put AS (
        INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, attempt, lease_until, after_abandoned,
                caller, key_tag, operation, created_at, changed_at, expires_at, purge_at)
            SELECT m.id, 'in-progress', m.fingerprint, started, 1, m.attempt, started + m.lease_ms, false,
                m.caller, m.key_tag, m.operation, started, started, started + m.lease_ms + m.retention_ms,
                oncegate.purge_at(0, started + m.lease_ms + m.retention_ms, started)
            FROM mine AS m
            ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING
            RETURNING t.id
    )
    -- INSERT can return only the columns of the table. Finding out which claims its rows belong to compares every row with every
    -- claim, and is needed only if another transaction inserted one of the records meanwhile.
    SELECT CASE WHEN (SELECT count(*) FROM put) = (SELECT count(*) FROM mine)
            THEN (SELECT array_agg(m.n) FROM mine AS m)
            ELSE (SELECT array_agg(m.n) FROM put AS p JOIN mine AS m ON m.id = p.id)
        END INTO inserted;

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
            -- The responses of this statement have reached their limit. Nothing was done: send this claim again.
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
                    claim_many.on_abandoned[n], callers[n], operations[n], key_tags[n]) AS c;
            responses_size := responses_size + coalesce(octet_length(response), 0);
            RETURN NEXT;
        END IF;
    END LOOP;
END
$$;

-- Many completions in one statement and one transaction. Returns a row for each, in their order.
CREATE OR REPLACE FUNCTION oncegate.complete_many(
    ids bytea[], tokens bigint[], states text[], responses bytea[], retentions_ms bigint[]
) RETURNS TABLE (outcome text, clock bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    started bigint := oncegate.now_ms();
    completed bigint[];
    watched bytea[];
BEGIN
    -- Most completions are the first end of an attempt that owns its record: they are written together. Everything else, and
    -- everything that complete_if_owner() would refuse, is left to it.
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
            -- The check for a watch is that of oncegate.notify_watchers, without the call of a function for each row.
            RETURNING m.n, t.id, NOT (CASE WHEN pg_try_advisory_lock(oncegate.watch_key(t.id))
                THEN pg_advisory_unlock(oncegate.watch_key(t.id)) ELSE false END) AS is_watched
    )
    SELECT array_agg(p.n), array_agg(p.id) FILTER (WHERE p.is_watched) INTO completed, watched FROM put AS p;
    IF watched IS NOT NULL THEN
        PERFORM oncegate.notify_watchers(w.id) FROM unnest(watched) AS w (id);
    END IF;

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

