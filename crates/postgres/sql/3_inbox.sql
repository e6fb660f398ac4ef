-- Messages that are processed once. A consumer takes a message in the transaction that holds its effect: the receipt commits
-- with the effect, or neither does. What callers may rely on is in docs/reference/messages-postgres.md.
--
-- Nobody waits here either: an advisory lock on the message is tried before anything is looked at, whoever does not get it is
-- told at once, and what it protects rests on the primary key alone.

-- The lock that is tried before a message is looked at.
CREATE OR REPLACE FUNCTION oncegate.message_lock(id bytea) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN hashtextextended(encode(id, 'hex'), 1835365491);

-- The lock that is tried before a stream is looked at.
CREATE OR REPLACE FUNCTION oncegate.stream_lock(consumer text, stream text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN hashtextextended(length(consumer) || ' ' || consumer || stream, 1937011312);

-- Where the receipt of a message is: the derivation of record identifiers (see vectors/record_ids.json) for the scope of a single
-- tenant, with what tells that it is a message, the consumer's name, what kind of identity it is, and the topic where that counts.
CREATE OR REPLACE FUNCTION oncegate.message_record(
    consumer text, message text, kind text[] DEFAULT ARRAY['own'], topic text DEFAULT ''
) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    key bytea := convert_to(message_record.message, 'UTF8');
    part bytea;
    parts text[];
    said bytea := '';
BEGIN
    IF (message_record.consumer ~ '^[!-~]{1,100}$' COLLATE "C" AND octet_length(key) > 0 AND array_ndims(message_record.kind) = 1
        AND array_position(message_record.kind, NULL) IS NULL AND message_record.topic IS NOT NULL) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a consumer has a name of 1 to 100 characters of ASCII without spaces, and a message an identity'
            USING ERRCODE = '22023';
    END IF;
    parts := ARRAY['message', message_record.consumer] || message_record.kind;
    IF octet_length(key) > 255 THEN
        key := convert_to(encode(sha256(key), 'hex'), 'UTF8');
        parts := parts || 'sha256'::text;
    END IF;
    parts := parts || message_record.topic;
    FOR n IN 1..cardinality(parts) LOOP
        part := convert_to(parts[n], 'UTF8');
        said := said || int8send(octet_length(part)) || part;
    END LOOP;
    RETURN sha256(int8send(17) || convert_to('oncegate-record-1', 'UTF8') || int8send(32) || decode(repeat('00', 32), 'hex')
        || int8send(cardinality(parts)) || said || int8send(octet_length(key)) || key);
END
$$;

CREATE OR REPLACE FUNCTION oncegate.check_messages(ids bytea[], retention_ms bigint) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (cardinality(ids) <= 1000 AND coalesce(array_ndims(ids), 1) = 1 AND array_position(ids, NULL) IS NULL) IS NOT TRUE
        OR EXISTS (SELECT FROM unnest(ids) AS a (id) WHERE octet_length(a.id) <> 32)
    THEN
        RAISE EXCEPTION 'oncegate: a message is told by 32 octets, and a batch has 1000 messages at most' USING ERRCODE = '22023';
    END IF;
    PERFORM oncegate.check_duration('retention_ms', check_messages.retention_ms, 34560000000);
END
$$;

-- Takes messages in the transaction that is to hold their effects, and writes the receipts of those that are to be processed.
-- Outcomes, in the order of the messages: process; processed, before or earlier in this batch; in-flight elsewhere; dead;
-- reused, where what was processed or is dead had another digest. attempts: how many there were that failed; reason: why it is
-- dead; at: when this was, by the clock of the server, by which oncegate.message_dead knows the receipt again.
--
-- Where the transaction rolls back, nothing was taken. New messages are inserted together by one statement; its look is older
-- than its locks, and what was committed in between meets the primary key and is looked at again.
CREATE OR REPLACE FUNCTION oncegate.receive_many(ids bytea[], retention_ms bigint, digests bytea[] DEFAULT NULL)
RETURNS TABLE (outcome text, attempts integer, reason text, at bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    ends CONSTANT bigint := clock + least(receive_many.retention_ms, 34560000000);
    inserted bytea[];
    taken bytea[];
    taken_attempts integer[];
    buried bytea[];
BEGIN
    PERFORM oncegate.check_messages(receive_many.ids, receive_many.retention_ms);
    IF cardinality(receive_many.digests) <> cardinality(receive_many.ids) OR array_ndims(receive_many.digests) > 1 THEN
        RAISE EXCEPTION 'oncegate: there are as many digests as messages, or none' USING ERRCODE = '22023';
    END IF;
    WITH put AS (
        INSERT INTO oncegate.processed AS t (id, changed_at, expires_at, purge_at, attempts, state, digest)
            SELECT a.id, clock, ends, oncegate.purge_at(0, ends, clock), 1, 'p', a.digest
            FROM unnest(receive_many.ids, receive_many.digests) AS a (id, digest)
            WHERE NOT EXISTS (SELECT FROM oncegate.processed AS p WHERE p.id = a.id)
                AND pg_try_advisory_xact_lock(oncegate.message_lock(a.id))
            ON CONFLICT ON CONSTRAINT processed_pkey DO NOTHING
            RETURNING t.id
    )
    SELECT array_agg(p.id) INTO inserted FROM put AS p;
    IF cardinality(inserted) = cardinality(receive_many.ids) THEN
        RETURN QUERY SELECT 'process'::text, 0, NULL::text, clock FROM unnest(receive_many.ids);
        RETURN;
    END IF;
    -- Those that were begun or failed before, and those whose retention is over.
    WITH held AS MATERIALIZED (
        SELECT t.id, CASE WHEN clock < t.expires_at THEN t.attempts ELSE 0 END AS attempts
        FROM oncegate.processed AS t
        WHERE t.id = ANY (receive_many.ids) AND (t.state = 'o' OR clock >= t.expires_at)
            AND pg_try_advisory_xact_lock(oncegate.message_lock(t.id))
        FOR UPDATE SKIP LOCKED
    ), put AS (
        UPDATE oncegate.processed AS t SET
                state = 'p', attempts = least(h.attempts, 2147483646) + 1, begun_by = NULL, reason = NULL,
                digest = receive_many.digests[array_position(receive_many.ids, h.id)],
                changed_at = clock, expires_at = ends, purge_at = oncegate.purge_at(t.purge_at, ends, clock)
            FROM held AS h WHERE t.id = h.id
            RETURNING t.id, h.attempts
    )
    SELECT array_agg(p.id), array_agg(p.attempts) INTO taken, taken_attempts FROM put AS p;
    -- Whether what is dead stays dead: a letter may be taken out just now.
    WITH held AS MATERIALIZED (
        SELECT t.id FROM oncegate.processed AS t
        WHERE t.id = ANY (receive_many.ids) AND t.state = 'd' AND clock < t.expires_at
        FOR KEY SHARE SKIP LOCKED
    )
    SELECT array_agg(h.id) INTO buried FROM held AS h;
    RETURN QUERY
        SELECT CASE
                WHEN a.turn = 1 AND (a.id = ANY (inserted) OR a.id = ANY (taken)) THEN 'process'
                WHEN l.digest <> a.digest AND (l.state = 'p' OR a.id = ANY (buried)) THEN 'reused'
                WHEN l.state = 'p' THEN 'processed'
                WHEN l.state = 'd' AND a.id = ANY (buried) THEN 'dead'
                ELSE 'in-flight'
            END,
            CASE WHEN a.id = ANY (inserted) THEN 0
                ELSE coalesce(taken_attempts[array_position(taken, a.id)], l.attempts, 0) END,
            l.reason, clock
        FROM (
            SELECT u.id, u.digest, u.n, row_number() OVER (PARTITION BY u.id ORDER BY u.n) AS turn
            FROM unnest(receive_many.ids, receive_many.digests) WITH ORDINALITY AS u (id, digest, n)
        ) AS a
        LEFT JOIN LATERAL (
            SELECT t.state, t.attempts, t.reason, t.digest FROM oncegate.processed AS t
            WHERE t.id = a.id AND t.state <> 'o' AND clock < t.expires_at
        ) AS l ON true
        ORDER BY a.n;
END
$$;

-- One message; see oncegate.receive_many.
CREATE OR REPLACE FUNCTION oncegate.receive(
    id bytea, retention_ms bigint DEFAULT 604800000, digest bytea DEFAULT NULL, OUT outcome text, OUT attempts integer,
    OUT reason text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    SELECT r.outcome, r.attempts, r.reason INTO outcome, attempts, reason
        FROM oncegate.receive_many(ARRAY[receive.id], receive.retention_ms, ARRAY[receive.digest]) AS r;
END
$$;

-- In a transaction of its own, before messages that may have been delivered before are processed: notes who begins them, so that
-- one that ends its process is counted all the same. by: a number that each process draws when it starts. One that another
-- process began and said nothing of since was cut off, and counts as an attempt. Outcomes: process; processed; in-flight; dead;
-- alone, where it was cut off or failed before and there are others in the batch: it is not begun, but to be begun by itself,
-- so that it takes no other along.
CREATE OR REPLACE FUNCTION oncegate.begin_messages(ids bytea[], by bigint, retention_ms bigint)
RETURNS TABLE (outcome text, attempts integer, reason text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    ends CONSTANT bigint := clock + least(begin_messages.retention_ms, 34560000000);
    inserted bytea[];
    taken bytea[];
    taken_attempts integer[];
    buried bytea[];
BEGIN
    PERFORM oncegate.check_messages(begin_messages.ids, begin_messages.retention_ms);
    IF begin_messages.by IS NULL THEN
        RAISE EXCEPTION 'oncegate: who begins a message says so by a number' USING ERRCODE = '22023';
    END IF;
    WITH put AS (
        INSERT INTO oncegate.processed AS t (id, changed_at, expires_at, purge_at, begun_by, attempts, state)
            SELECT a.id, clock, ends, oncegate.purge_at(0, ends, clock), begin_messages.by, 0, 'o'
            FROM unnest(begin_messages.ids) AS a (id)
            WHERE NOT EXISTS (SELECT FROM oncegate.processed AS p WHERE p.id = a.id)
                AND pg_try_advisory_xact_lock(oncegate.message_lock(a.id))
            ON CONFLICT ON CONSTRAINT processed_pkey DO NOTHING
            RETURNING t.id
    )
    SELECT array_agg(p.id) INTO inserted FROM put AS p;
    IF cardinality(inserted) = cardinality(begin_messages.ids) THEN
        RETURN QUERY SELECT 'process'::text, 0, NULL::text FROM unnest(begin_messages.ids);
        RETURN;
    END IF;
    WITH held AS MATERIALIZED (
        SELECT t.id, CASE
                WHEN clock >= t.expires_at THEN 0
                WHEN t.begun_by <> begin_messages.by THEN least(t.attempts, 2147483646) + 1
                ELSE t.attempts
            END AS attempts
        FROM oncegate.processed AS t
        WHERE t.id = ANY (begin_messages.ids) AND (t.state = 'o' OR clock >= t.expires_at)
            AND pg_try_advisory_xact_lock(oncegate.message_lock(t.id))
        FOR UPDATE SKIP LOCKED
    ), begun AS MATERIALIZED (
        SELECT h.id, h.attempts, CASE WHEN h.attempts = 0 OR cardinality(begin_messages.ids) = 1 THEN begin_messages.by END AS by
        FROM held AS h
    ), put AS (
        UPDATE oncegate.processed AS t SET
                state = 'o', attempts = b.attempts, begun_by = b.by, reason = NULL, digest = NULL,
                changed_at = clock, expires_at = ends, purge_at = oncegate.purge_at(t.purge_at, ends, clock)
            FROM begun AS b
            WHERE t.id = b.id AND (t.state <> 'o' OR t.attempts <> b.attempts OR t.begun_by IS DISTINCT FROM b.by)
    )
    SELECT array_agg(b.id), array_agg(b.attempts) INTO taken, taken_attempts FROM begun AS b;
    -- Whether what is dead stays dead: a letter may be taken out just now.
    WITH held AS MATERIALIZED (
        SELECT t.id FROM oncegate.processed AS t
        WHERE t.id = ANY (begin_messages.ids) AND t.state = 'd' AND clock < t.expires_at
        FOR KEY SHARE SKIP LOCKED
    )
    SELECT array_agg(h.id) INTO buried FROM held AS h;
    RETURN QUERY
        SELECT CASE
                WHEN a.id = ANY (inserted) THEN 'process'
                WHEN a.id = ANY (taken) THEN
                    CASE WHEN cardinality(begin_messages.ids) = 1 OR taken_attempts[array_position(taken, a.id)] = 0
                        THEN 'process' ELSE 'alone' END
                WHEN l.state = 'p' THEN 'processed'
                WHEN l.state = 'd' AND a.id = ANY (buried) THEN 'dead'
                ELSE 'in-flight'
            END,
            CASE WHEN a.id = ANY (inserted) THEN 0
                ELSE coalesce(taken_attempts[array_position(taken, a.id)], l.attempts, 0) END,
            l.reason
        FROM unnest(begin_messages.ids) WITH ORDINALITY AS a (id, n)
        LEFT JOIN LATERAL (
            SELECT t.state, t.attempts, t.reason FROM oncegate.processed AS t
            WHERE t.id = a.id AND t.state <> 'o' AND clock < t.expires_at
        ) AS l ON true
        ORDER BY a.n;
END
$$;

-- In a transaction of its own, after the one that was to hold the effect has rolled back: counts an attempt that failed.
-- Outcomes: failed, processed, in-flight, dead; attempts: how many have failed by now.
CREATE OR REPLACE FUNCTION oncegate.message_failed(id bytea, retention_ms bigint, OUT outcome text, OUT attempts integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    ends CONSTANT bigint := clock + least(message_failed.retention_ms, 34560000000);
    r oncegate.processed;
BEGIN
    PERFORM oncegate.check_messages(ARRAY[message_failed.id], message_failed.retention_ms);
    outcome := 'in-flight';
    attempts := 0;
    IF NOT pg_try_advisory_xact_lock(oncegate.message_lock(message_failed.id)) THEN
        RETURN;
    END IF;
    SELECT t.* INTO r FROM oncegate.processed AS t WHERE t.id = message_failed.id FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        IF clock < r.expires_at THEN
            attempts := r.attempts;
            IF r.state <> 'o' THEN
                outcome := CASE r.state WHEN 'p' THEN 'processed' ELSE 'dead' END;
                RETURN;
            END IF;
        END IF;
        attempts := least(attempts, 2147483646) + 1;
        outcome := 'failed';
        UPDATE oncegate.processed AS t SET
                state = 'o', attempts = message_failed.attempts, begun_by = NULL, reason = NULL, digest = NULL,
                changed_at = clock, expires_at = ends, purge_at = oncegate.purge_at(t.purge_at, ends, clock)
            WHERE t.id = message_failed.id;
        RETURN;
    END IF;
    -- Not there, or held by somebody who purges.
    PERFORM FROM oncegate.processed AS t WHERE t.id = message_failed.id;
    IF FOUND THEN
        RETURN;
    END IF;
    INSERT INTO oncegate.processed AS t (id, changed_at, expires_at, purge_at, attempts, state)
        VALUES (message_failed.id, clock, ends, oncegate.purge_at(0, ends, clock), 1, 'o')
        ON CONFLICT ON CONSTRAINT processed_pkey DO NOTHING;
    IF FOUND THEN
        outcome := 'failed';
        attempts := 1;
    END IF;
END
$$;

-- In a transaction of its own: takes back that this one has begun a message, where it has left it alone without an attempt. So whoever
-- gets it next does not take it for one that was cut off. What is counted stays.
CREATE OR REPLACE FUNCTION oncegate.message_not_begun(id bytea, by bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE oncegate.processed AS t SET begun_by = NULL WHERE t.id = (
        SELECT p.id FROM oncegate.processed AS p
        WHERE p.id = message_not_begun.id AND p.state = 'o' AND p.begun_by = message_not_begun.by
        FOR UPDATE SKIP LOCKED);
END
$$;

-- Gives a message up, in a transaction of its own: it is dead and its letter is written, or neither. Outcomes: written; dead,
-- which it was before, for known_reason, and no second letter is written; processed; in-flight. doubtful_at: it is given up where
-- it was processed by the transaction that took it then, and only there, because that is known to have been committed without all
-- of its effect; open, where it is not processed.
CREATE OR REPLACE FUNCTION oncegate.message_dead(
    id bytea,
    consumer text,
    reason text,
    attempts integer,
    error text,
    topic text,
    broker_id text,
    order_key bytea,
    header_names text[],
    header_values bytea[],
    payload bytea,
    retention_ms bigint,
    digest bytea DEFAULT NULL,
    doubtful_at bigint DEFAULT NULL,
    OUT outcome text,
    OUT number bigint,
    OUT known_reason text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    ends CONSTANT bigint := clock + least(message_dead.retention_ms, 34560000000);
    r oncegate.processed;
BEGIN
    PERFORM oncegate.check_messages(ARRAY[message_dead.id], message_dead.retention_ms);
    IF (octet_length(message_dead.consumer) BETWEEN 1 AND 100 AND octet_length(message_dead.reason) BETWEEN 1 AND 100
        AND message_dead.attempts >= 0 AND octet_length(message_dead.error) <= 4000 AND message_dead.topic IS NOT NULL
        AND cardinality(message_dead.header_names) = cardinality(message_dead.header_values)
        AND message_dead.payload IS NOT NULL) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: an argument of message_dead is not what the contract says' USING ERRCODE = '22023';
    END IF;
    outcome := 'in-flight';
    IF NOT pg_try_advisory_xact_lock(oncegate.message_lock(message_dead.id)) THEN
        RETURN;
    END IF;
    SELECT t.* INTO r FROM oncegate.processed AS t WHERE t.id = message_dead.id FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- Not there, or held by somebody who purges.
        PERFORM FROM oncegate.processed AS t WHERE t.id = message_dead.id;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    IF r.state <> 'o' AND clock < r.expires_at THEN
        IF (r.state = 'p' AND r.changed_at = message_dead.doubtful_at) IS NOT TRUE THEN
            outcome := CASE r.state WHEN 'p' THEN 'processed' ELSE 'dead' END;
            known_reason := r.reason;
            RETURN;
        END IF;
    ELSIF message_dead.doubtful_at IS NOT NULL THEN
        outcome := 'open';
        RETURN;
    END IF;
    IF r.id IS NOT NULL THEN
        UPDATE oncegate.processed AS t SET
                state = 'd', attempts = message_dead.attempts, begun_by = NULL, reason = message_dead.reason, digest = message_dead.digest,
                changed_at = clock, expires_at = ends, purge_at = oncegate.purge_at(t.purge_at, ends, clock)
            WHERE t.id = message_dead.id;
    ELSE
        INSERT INTO oncegate.processed AS t (id, changed_at, expires_at, purge_at, attempts, state, reason, digest)
            VALUES (message_dead.id, clock, ends, oncegate.purge_at(0, ends, clock), message_dead.attempts, 'd',
                message_dead.reason, message_dead.digest)
            ON CONFLICT ON CONSTRAINT processed_pkey DO NOTHING;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    outcome := 'written';
    INSERT INTO oncegate.dead_letters AS t (id, consumer, reason, attempts, error, topic, broker_id, order_key, header_names,
            header_values, payload, at)
        VALUES (message_dead.id, message_dead.consumer, message_dead.reason, message_dead.attempts, message_dead.error,
            message_dead.topic, message_dead.broker_id, message_dead.order_key, message_dead.header_names,
            message_dead.header_values, message_dead.payload, clock)
        RETURNING t.number INTO number;
END
$$;

-- Dead letters in the order in which they were written, after this number; of one consumer, or of all where it is null. 8 MiB
-- of payloads and headers at the most, or one letter: there are no more where there is no row.
CREATE OR REPLACE FUNCTION oncegate.list_dead_letters(only_consumer text, after bigint, most integer)
RETURNS TABLE (
    number bigint, id bytea, consumer text, reason text, attempts integer, error text, topic text, broker_id text,
    order_key bytea, header_names text[], header_values bytea[], payload bytea, at bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    octets bigint := 0;
    d oncegate.dead_letters;
BEGIN
    FOR d IN
        SELECT t.* FROM oncegate.dead_letters AS t
        WHERE t.number > coalesce(list_dead_letters.after, -1)
            AND (list_dead_letters.only_consumer IS NULL OR t.consumer = list_dead_letters.only_consumer)
        ORDER BY t.number
        LIMIT least(greatest(coalesce(list_dead_letters.most, 100), 1), 1000)
    LOOP
        EXIT WHEN octets >= 8388608;
        octets := octets + octet_length(d.payload) + coalesce(
            (SELECT sum(octet_length(h)) FROM unnest(d.header_values) AS u (h)), 0);
        number := d.number; id := d.id; consumer := d.consumer; reason := d.reason; attempts := d.attempts; error := d.error;
        topic := d.topic; broker_id := d.broker_id; order_key := d.order_key; header_names := d.header_names;
        header_values := d.header_values; payload := d.payload; at := d.at;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Takes a dead letter out, so that its message may be processed again, and gives it to be sent again before the transaction
-- commits; no row where there is none. Until the commit the message is in flight to every consumer. OG002: another
-- transaction holds it.
CREATE OR REPLACE FUNCTION oncegate.take_dead_letter(number bigint)
RETURNS TABLE (
    id bytea, consumer text, topic text, broker_id text, order_key bytea, header_names text[], header_values bytea[], payload bytea
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    d oncegate.dead_letters;
BEGIN
    SELECT t.* INTO d FROM oncegate.dead_letters AS t WHERE t.number = take_dead_letter.number FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.dead_letters AS t WHERE t.number = take_dead_letter.number;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        RAISE EXCEPTION 'oncegate: another transaction holds the dead letter' USING ERRCODE = 'OG002';
    END IF;
    IF NOT pg_try_advisory_xact_lock(oncegate.message_lock(d.id)) THEN
        RAISE EXCEPTION 'oncegate: another transaction holds the message' USING ERRCODE = 'OG002';
    END IF;
    -- Held by a transaction that was told that it is dead, and is about to acknowledge it.
    PERFORM FROM oncegate.processed AS t WHERE t.id = d.id AND t.state = 'd' FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        DELETE FROM oncegate.processed AS t WHERE t.id = d.id;
    ELSE
        PERFORM FROM oncegate.processed AS t WHERE t.id = d.id AND t.state = 'd';
        IF FOUND THEN
            RAISE EXCEPTION 'oncegate: another transaction holds the message' USING ERRCODE = 'OG002';
        END IF;
    END IF;
    DELETE FROM oncegate.dead_letters AS t WHERE t.number = d.number;
    id := d.id; consumer := d.consumer; topic := d.topic; broker_id := d.broker_id; order_key := d.order_key;
    header_names := d.header_names; header_values := d.header_values; payload := d.payload;
    RETURN NEXT;
END
$$;

-- Deletes a dead letter, and says whether there was one. Its message stays dead for as long as its receipt is kept.
CREATE OR REPLACE FUNCTION oncegate.delete_dead_letter(number bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM oncegate.dead_letters AS t WHERE t.number = (
        SELECT d.number FROM oncegate.dead_letters AS d WHERE d.number = delete_dead_letter.number FOR UPDATE SKIP LOCKED);
    RETURN FOUND;
END
$$;

-- Removes at most so many receipts whose retention is over, 1000 at a time, and says how many. Any number may run at once.
CREATE OR REPLACE FUNCTION oncegate.purge_processed(most integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    began CONSTANT bigint := oncegate.purge_from('processed', clock);
    place bigint := began;
    purged integer := 0;
    gone integer;
    moved integer;
BEGIN
    FOR turn IN 1..10 LOOP
        EXIT WHEN purged >= least(greatest(purge_processed.most, 0), 1000);
        WITH due AS (
            SELECT t.id, t.expires_at, t.purge_at FROM oncegate.processed AS t
            WHERE t.purge_at >= place AND t.purge_at <= clock
            ORDER BY t.purge_at
            LIMIT least(greatest(purge_processed.most, 0), 1000) - purged
            FOR UPDATE SKIP LOCKED
        ), deleted AS (
            DELETE FROM oncegate.processed AS t USING due
            WHERE t.id = due.id AND due.expires_at <= clock
            RETURNING 1
        ), noted AS (
            UPDATE oncegate.processed AS t SET purge_at = oncegate.purge_at(0, t.expires_at, clock) FROM due
            WHERE t.id = due.id AND due.expires_at > clock
            RETURNING 1
        )
        SELECT (SELECT count(*) FROM deleted), (SELECT count(*) FROM noted), coalesce((SELECT max(due.purge_at) FROM due), place)
            INTO gone, moved, place;
        purged := purged + gone;
        EXIT WHEN gone + moved = 0;
    END LOOP;
    IF purge_processed.most > 0 AND (began = 0 OR place > began) THEN
        PERFORM oncegate.purge_reached('processed', clock, began, coalesce((SELECT t.purge_at FROM oncegate.processed AS t
            WHERE t.purge_at >= began ORDER BY t.purge_at LIMIT 1), clock));
    END IF;
    RETURN purged;
END
$$;

-- Takes an event of a stream in the transaction that is to hold its effect. Sequences count one by one from first. Outcomes:
-- apply, and the position has moved; applied before; busy, where another transaction is at this stream; gap, with the
-- sequence that is expected. Where an event is given it is kept for its turn in place of a gap: parked, or full where so many
-- are kept already. is_more: oncegate.take_parked has the next one.
CREATE OR REPLACE FUNCTION oncegate.stream_event(
    consumer text,
    stream text,
    sequence bigint,
    first bigint DEFAULT 1,
    event bytea DEFAULT NULL,
    most integer DEFAULT 1000,
    OUT outcome text,
    OUT expected bigint,
    OUT is_more boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    is_there boolean;
BEGIN
    IF (octet_length(stream_event.consumer) BETWEEN 1 AND 100 AND octet_length(stream_event.stream) BETWEEN 1 AND 255
        AND stream_event.first >= 0 AND stream_event.sequence >= stream_event.first
        AND stream_event.sequence < 9223372036854775807 AND stream_event.most >= 0) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a stream has a name of 1 to 255 octets, and its events are counted from its first sequence'
            USING ERRCODE = '22023';
    END IF;
    is_more := false;
    IF NOT pg_try_advisory_xact_lock(oncegate.stream_lock(stream_event.consumer, stream_event.stream)) THEN
        outcome := 'busy';
        RETURN;
    END IF;
    SELECT t.next INTO expected FROM oncegate.stream_positions AS t
        WHERE t.consumer = stream_event.consumer AND t.stream = stream_event.stream;
    is_there := FOUND;
    expected := coalesce(expected, stream_event.first);
    IF stream_event.sequence < expected THEN
        outcome := 'applied';
        RETURN;
    END IF;
    IF stream_event.sequence > expected AND stream_event.event IS NULL THEN
        outcome := 'gap';
        RETURN;
    END IF;
    -- What is written to the position meets whoever moved it after this transaction's snapshot.
    IF is_there THEN
        UPDATE oncegate.stream_positions AS t SET
                next = CASE WHEN stream_event.sequence = expected THEN expected + 1 ELSE t.next END, changed_at = clock
            WHERE t.consumer = stream_event.consumer AND t.stream = stream_event.stream AND t.next = expected;
    ELSE
        INSERT INTO oncegate.stream_positions AS t (consumer, stream, next, changed_at)
            VALUES (stream_event.consumer, stream_event.stream,
                CASE WHEN stream_event.sequence = expected THEN expected + 1 ELSE expected END, clock)
            ON CONFLICT ON CONSTRAINT stream_positions_pkey DO NOTHING;
    END IF;
    IF NOT FOUND THEN
        outcome := 'busy';
        RETURN;
    END IF;
    IF stream_event.sequence = expected THEN
        outcome := 'apply';
        DELETE FROM oncegate.parked_events AS t WHERE t.consumer = stream_event.consumer
            AND t.stream = stream_event.stream AND t.sequence = stream_event.sequence;
        is_more := EXISTS (SELECT FROM oncegate.parked_events AS t WHERE t.consumer = stream_event.consumer
            AND t.stream = stream_event.stream AND t.sequence = stream_event.sequence + 1);
        RETURN;
    END IF;
    outcome := 'parked';
    PERFORM FROM oncegate.parked_events AS t WHERE t.consumer = stream_event.consumer
        AND t.stream = stream_event.stream AND t.sequence = stream_event.sequence;
    IF FOUND THEN
        RETURN;
    END IF;
    IF (SELECT count(*) FROM (SELECT FROM oncegate.parked_events AS t WHERE t.consumer = stream_event.consumer
        AND t.stream = stream_event.stream LIMIT stream_event.most) AS u) >= stream_event.most
    THEN
        outcome := 'full';
        RETURN;
    END IF;
    INSERT INTO oncegate.parked_events AS t (consumer, stream, sequence, event, at)
        VALUES (stream_event.consumer, stream_event.stream, stream_event.sequence, stream_event.event, clock);
END
$$;

-- The next event of a stream where it is parked, to be applied in this transaction; the position has moved. All null where it
-- is not there, or another transaction is at this stream.
CREATE OR REPLACE FUNCTION oncegate.take_parked(consumer text, stream text, OUT sequence bigint, OUT event bytea, OUT is_more boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(oncegate.stream_lock(take_parked.consumer, take_parked.stream)) THEN
        RETURN;
    END IF;
    DELETE FROM oncegate.parked_events AS t USING oncegate.stream_positions AS s
        WHERE t.consumer = take_parked.consumer AND t.stream = take_parked.stream
            AND s.consumer = t.consumer AND s.stream = t.stream AND t.sequence = s.next
        RETURNING t.sequence, t.event INTO sequence, event;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE oncegate.stream_positions AS t SET next = take_parked.sequence + 1, changed_at = oncegate.now_ms()
        WHERE t.consumer = take_parked.consumer AND t.stream = take_parked.stream;
    is_more := EXISTS (SELECT FROM oncegate.parked_events AS t WHERE t.consumer = take_parked.consumer
        AND t.stream = take_parked.stream AND t.sequence = take_parked.sequence + 1);
END
$$;

-- Streams that wait for an event: which one, what is parked behind it, and since when.
CREATE OR REPLACE FUNCTION oncegate.list_gaps(only_consumer text, most integer)
RETURNS TABLE (consumer text, stream text, expected bigint, first_parked bigint, parked bigint, since bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p.consumer, p.stream, min(s.next), min(p.sequence), count(*), min(p.at)
    FROM oncegate.parked_events AS p
    JOIN oncegate.stream_positions AS s ON s.consumer = p.consumer AND s.stream = p.stream
    WHERE only_consumer IS NULL OR p.consumer = only_consumer
    GROUP BY p.consumer, p.stream
    ORDER BY min(p.at)
    LIMIT least(greatest(coalesce(most, 100), 1), 1000)
$$;

-- For an operator: from here on a stream expects this event, because one before it is lost, or because its projection is built
-- anew. What was parked before it is deleted; oncegate.take_parked has the next one where it is parked. OG002: another
-- transaction is at this stream.
CREATE OR REPLACE FUNCTION oncegate.set_stream(consumer text, stream text, expected bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(set_stream.consumer) BETWEEN 1 AND 100 AND octet_length(set_stream.stream) BETWEEN 1 AND 255
        AND set_stream.expected >= 0) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a stream has a name of 1 to 255 octets, and expects a sequence from 0' USING ERRCODE = '22023';
    END IF;
    IF NOT pg_try_advisory_xact_lock(oncegate.stream_lock(set_stream.consumer, set_stream.stream)) THEN
        RAISE EXCEPTION 'oncegate: another transaction is at this stream' USING ERRCODE = 'OG002';
    END IF;
    INSERT INTO oncegate.stream_positions AS t (consumer, stream, next, changed_at)
        VALUES (set_stream.consumer, set_stream.stream, set_stream.expected, oncegate.now_ms())
        ON CONFLICT ON CONSTRAINT stream_positions_pkey
        DO UPDATE SET next = excluded.next, changed_at = excluded.changed_at;
    DELETE FROM oncegate.parked_events AS t WHERE t.consumer = set_stream.consumer AND t.stream = set_stream.stream
        AND t.sequence < set_stream.expected;
END
$$;

