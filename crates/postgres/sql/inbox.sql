-- Messages that are processed once. A consumer takes a message in the transaction that holds its effect: the receipt and the
-- effect are committed together, or neither is. docs/reference/messages-postgres.md says what callers may rely on.
--
-- No call waits here either. Before a call reads a message, it tries an advisory lock on it, and returns at once if it does not
-- get the lock. Correctness rests on the primary key alone.

-- The advisory lock of a message.
CREATE OR REPLACE FUNCTION oncegate.message_lock(id bytea) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN hashtextextended(encode(id, 'hex'), 1835365491);

-- The advisory lock of a stream.
CREATE OR REPLACE FUNCTION oncegate.stream_lock(consumer text, stream text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN hashtextextended(length(consumer) || ' ' || consumer || stream, 1937011312);

-- The identifier of the receipt of a message. It is derived like the identifier of a record (see vectors/record_ids.json) in
-- the scope of a single tenant. The operation is `message`, the name of the consumer, the kind of identity, and the topic if it
-- counts.
CREATE OR REPLACE FUNCTION oncegate.message_record(
    consumer text, message text, kind text[] DEFAULT ARRAY['own'], topic text DEFAULT ''
) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    key bytea := convert_to(message_record.message, 'UTF8');
    part bytea;
    parts text[];
    encoded bytea := '';
BEGIN
    IF (message_record.consumer ~ '^[!-~]{1,100}$' COLLATE "C" AND octet_length(key) > 0 AND array_ndims(message_record.kind) = 1
        AND array_position(message_record.kind, NULL) IS NULL AND message_record.topic IS NOT NULL) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a consumer must have a name of 1 to 100 printable ASCII characters without spaces, and a message an identity'
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
        encoded := encoded || int8send(octet_length(part)) || part;
    END LOOP;
    RETURN sha256(int8send(17) || convert_to('oncegate-record-1', 'UTF8') || int8send(32) || decode(repeat('00', 32), 'hex')
        || int8send(cardinality(parts)) || encoded || int8send(octet_length(key)) || key);
END
$$;

CREATE OR REPLACE FUNCTION oncegate.check_messages(ids bytea[], retention_ms bigint) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (cardinality(ids) <= 1000 AND coalesce(array_ndims(ids), 1) = 1 AND array_position(ids, NULL) IS NULL) IS NOT TRUE
        OR EXISTS (SELECT FROM unnest(ids) AS a (id) WHERE octet_length(a.id) <> 32)
    THEN
        RAISE EXCEPTION 'oncegate: the id of a message must have 32 bytes, and a batch at most 1000 messages' USING ERRCODE = '22023';
    END IF;
    PERFORM oncegate.check_duration('retention_ms', check_messages.retention_ms, 34560000000);
END
$$;

-- Takes messages in the transaction that will hold their effects, and writes the receipts of the messages to process. Outcomes,
-- in the order of the messages: process; processed, before or earlier in this batch; in-flight in another transaction; dead;
-- reused, if the message that was processed or is dead had another digest. attempts: the number of failed attempts. reason: the
-- reason why the message is dead. at: the server's time of this call, by which oncegate.write_dead_letter recognises the
-- receipt.
--
-- If the transaction rolls back, no message was taken. New messages are inserted by one statement. Its snapshot is older than
-- its locks, so a receipt that was committed in between meets the primary key and is read again.
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
    dead bytea[];
BEGIN
    PERFORM oncegate.check_messages(receive_many.ids, receive_many.retention_ms);
    IF cardinality(receive_many.digests) <> cardinality(receive_many.ids) OR array_ndims(receive_many.digests) > 1 THEN
        RAISE EXCEPTION 'oncegate: there are as many digests as messages, or none' USING ERRCODE = '22023';
    END IF;
    WITH put AS (
        INSERT INTO oncegate.receipts AS t (id, changed_at, expires_at, purge_at, attempts, state, digest)
            SELECT a.id, clock, ends, oncegate.purge_at(0, ends, clock), 1, 'p', a.digest
            FROM unnest(receive_many.ids, receive_many.digests) AS a (id, digest)
            WHERE NOT EXISTS (SELECT FROM oncegate.receipts AS p WHERE p.id = a.id)
                AND pg_try_advisory_xact_lock(oncegate.message_lock(a.id))
            ON CONFLICT ON CONSTRAINT receipts_pkey DO NOTHING
            RETURNING t.id
    )
    SELECT array_agg(p.id) INTO inserted FROM put AS p;
    IF cardinality(inserted) = cardinality(receive_many.ids) THEN
        RETURN QUERY SELECT 'process'::text, 0, NULL::text, clock FROM unnest(receive_many.ids);
        RETURN;
    END IF;
    -- Messages that were begun or failed before, and messages whose retention is over.
    WITH held AS MATERIALIZED (
        SELECT t.id, CASE WHEN clock < t.expires_at THEN t.attempts ELSE 0 END AS attempts
        FROM oncegate.receipts AS t
        WHERE t.id = ANY (receive_many.ids) AND (t.state = 'o' OR clock >= t.expires_at)
            AND pg_try_advisory_xact_lock(oncegate.message_lock(t.id))
        FOR UPDATE SKIP LOCKED
    ), put AS (
        UPDATE oncegate.receipts AS t SET
                state = 'p', attempts = least(h.attempts, 2147483646) + 1, begun_by = NULL, reason = NULL,
                digest = receive_many.digests[array_position(receive_many.ids, h.id)],
                changed_at = clock, expires_at = ends, purge_at = oncegate.purge_at(t.purge_at, ends, clock)
            FROM held AS h WHERE t.id = h.id
            RETURNING t.id, h.attempts
    )
    SELECT array_agg(p.id), array_agg(p.attempts) INTO taken, taken_attempts FROM put AS p;
    -- Locks the dead messages so that they stay dead: an operator may be taking a dead letter out now.
    WITH held AS MATERIALIZED (
        SELECT t.id FROM oncegate.receipts AS t
        WHERE t.id = ANY (receive_many.ids) AND t.state = 'd' AND clock < t.expires_at
        FOR KEY SHARE SKIP LOCKED
    )
    SELECT array_agg(h.id) INTO dead FROM held AS h;
    RETURN QUERY
        SELECT CASE
                WHEN a.turn = 1 AND (a.id = ANY (inserted) OR a.id = ANY (taken)) THEN 'process'
                WHEN l.digest <> a.digest AND (l.state = 'p' OR a.id = ANY (dead)) THEN 'reused'
                WHEN l.state = 'p' THEN 'processed'
                WHEN l.state = 'd' AND a.id = ANY (dead) THEN 'dead'
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
            SELECT t.state, t.attempts, t.reason, t.digest FROM oncegate.receipts AS t
            WHERE t.id = a.id AND t.state <> 'o' AND clock < t.expires_at
        ) AS l ON true
        ORDER BY a.n;
END
$$;

-- Takes one message; see oncegate.receive_many.
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

-- In a transaction of its own, before messages that may have been delivered before are processed: notes the process that begins
-- them, so that a message that kills its process is counted. owner: a random number of the process. A message that another
-- process began without reporting an outcome was interrupted, which counts as an attempt. Outcomes: process; processed;
-- in-flight; dead; alone, if it was interrupted or failed before and is not the only one in the batch: it is not begun, and has
-- to be begun by itself, so that it cannot take other messages down with it.
CREATE OR REPLACE FUNCTION oncegate.begin_messages(ids bytea[], owner bigint, retention_ms bigint)
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
    dead bytea[];
BEGIN
    PERFORM oncegate.check_messages(begin_messages.ids, begin_messages.retention_ms);
    IF begin_messages.owner IS NULL THEN
        RAISE EXCEPTION 'oncegate: owner must not be null' USING ERRCODE = '22023';
    END IF;
    WITH put AS (
        INSERT INTO oncegate.receipts AS t (id, changed_at, expires_at, purge_at, begun_by, attempts, state)
            SELECT a.id, clock, ends, oncegate.purge_at(0, ends, clock), begin_messages.owner, 0, 'o'
            FROM unnest(begin_messages.ids) AS a (id)
            WHERE NOT EXISTS (SELECT FROM oncegate.receipts AS p WHERE p.id = a.id)
                AND pg_try_advisory_xact_lock(oncegate.message_lock(a.id))
            ON CONFLICT ON CONSTRAINT receipts_pkey DO NOTHING
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
                WHEN t.begun_by <> begin_messages.owner THEN least(t.attempts, 2147483646) + 1
                ELSE t.attempts
            END AS attempts
        FROM oncegate.receipts AS t
        WHERE t.id = ANY (begin_messages.ids) AND (t.state = 'o' OR clock >= t.expires_at)
            AND pg_try_advisory_xact_lock(oncegate.message_lock(t.id))
        FOR UPDATE SKIP LOCKED
    ), begun AS MATERIALIZED (
        SELECT h.id, h.attempts, CASE WHEN h.attempts = 0 OR cardinality(begin_messages.ids) = 1 THEN begin_messages.owner END AS owner
        FROM held AS h
    ), put AS (
        UPDATE oncegate.receipts AS t SET
                state = 'o', attempts = b.attempts, begun_by = b.owner, reason = NULL, digest = NULL,
                changed_at = clock, expires_at = ends, purge_at = oncegate.purge_at(t.purge_at, ends, clock)
            FROM begun AS b
            WHERE t.id = b.id AND (t.state <> 'o' OR t.attempts <> b.attempts OR t.begun_by IS DISTINCT FROM b.owner)
    )
    SELECT array_agg(b.id), array_agg(b.attempts) INTO taken, taken_attempts FROM begun AS b;
    -- Locks the dead messages so that they stay dead: an operator may be taking a dead letter out now.
    WITH held AS MATERIALIZED (
        SELECT t.id FROM oncegate.receipts AS t
        WHERE t.id = ANY (begin_messages.ids) AND t.state = 'd' AND clock < t.expires_at
        FOR KEY SHARE SKIP LOCKED
    )
    SELECT array_agg(h.id) INTO dead FROM held AS h;
    RETURN QUERY
        SELECT CASE
                WHEN a.id = ANY (inserted) THEN 'process'
                WHEN a.id = ANY (taken) THEN
                    CASE WHEN cardinality(begin_messages.ids) = 1 OR taken_attempts[array_position(taken, a.id)] = 0
                        THEN 'process' ELSE 'alone' END
                WHEN l.state = 'p' THEN 'processed'
                WHEN l.state = 'd' AND a.id = ANY (dead) THEN 'dead'
                ELSE 'in-flight'
            END,
            CASE WHEN a.id = ANY (inserted) THEN 0
                ELSE coalesce(taken_attempts[array_position(taken, a.id)], l.attempts, 0) END,
            l.reason
        FROM unnest(begin_messages.ids) WITH ORDINALITY AS a (id, n)
        LEFT JOIN LATERAL (
            SELECT t.state, t.attempts, t.reason FROM oncegate.receipts AS t
            WHERE t.id = a.id AND t.state <> 'o' AND clock < t.expires_at
        ) AS l ON true
        ORDER BY a.n;
END
$$;

-- In a transaction of its own, after the transaction of the effect has rolled back: counts a failed attempt. Outcomes: failed,
-- processed, in-flight, dead. attempts: the number of failed attempts so far.
CREATE OR REPLACE FUNCTION oncegate.fail_message(id bytea, retention_ms bigint, OUT outcome text, OUT attempts integer)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    ends CONSTANT bigint := clock + least(fail_message.retention_ms, 34560000000);
    r oncegate.receipts;
BEGIN
    PERFORM oncegate.check_messages(ARRAY[fail_message.id], fail_message.retention_ms);
    outcome := 'in-flight';
    attempts := 0;
    IF NOT pg_try_advisory_xact_lock(oncegate.message_lock(fail_message.id)) THEN
        RETURN;
    END IF;
    SELECT t.* INTO r FROM oncegate.receipts AS t WHERE t.id = fail_message.id FOR UPDATE SKIP LOCKED;
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
        UPDATE oncegate.receipts AS t SET
                state = 'o', attempts = fail_message.attempts, begun_by = NULL, reason = NULL, digest = NULL,
                changed_at = clock, expires_at = ends, purge_at = oncegate.purge_at(t.purge_at, ends, clock)
            WHERE t.id = fail_message.id;
        RETURN;
    END IF;
    -- There is no row, or a purge holds it.
    PERFORM FROM oncegate.receipts AS t WHERE t.id = fail_message.id;
    IF FOUND THEN
        RETURN;
    END IF;
    INSERT INTO oncegate.receipts AS t (id, changed_at, expires_at, purge_at, attempts, state)
        VALUES (fail_message.id, clock, ends, oncegate.purge_at(0, ends, clock), 1, 'o')
        ON CONFLICT ON CONSTRAINT receipts_pkey DO NOTHING;
    IF FOUND THEN
        outcome := 'failed';
        attempts := 1;
    END IF;
END
$$;

-- In a transaction of its own: withdraws the note that this process began a message, if it made no attempt. The next process
-- then does not count the message as interrupted. Counted attempts stay.
CREATE OR REPLACE FUNCTION oncegate.unbegin_message(id bytea, owner bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE oncegate.receipts AS t SET begun_by = NULL WHERE t.id = (
        SELECT p.id FROM oncegate.receipts AS p
        WHERE p.id = unbegin_message.id AND p.state = 'o' AND p.begun_by = unbegin_message.owner
        FOR UPDATE SKIP LOCKED);
END
$$;

-- Gives a message up, in a transaction of its own: marks it as dead and writes its dead letter, or does neither. Outcomes:
-- written; dead, if it was dead before, for known_reason, and no second dead letter is written; processed; in-flight.
-- received_at: gives the message up only if the transaction that received it at that time marked it as processed, because that
-- transaction is known to have been committed without all of its effects; then the outcome is open if the message is not
-- processed.
CREATE OR REPLACE FUNCTION oncegate.write_dead_letter(
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
    received_at bigint DEFAULT NULL,
    OUT outcome text,
    OUT number bigint,
    OUT known_reason text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    ends CONSTANT bigint := clock + least(write_dead_letter.retention_ms, 34560000000);
    r oncegate.receipts;
BEGIN
    PERFORM oncegate.check_messages(ARRAY[write_dead_letter.id], write_dead_letter.retention_ms);
    IF (octet_length(write_dead_letter.consumer) BETWEEN 1 AND 100 AND octet_length(write_dead_letter.reason) BETWEEN 1 AND 100
        AND write_dead_letter.attempts >= 0 AND octet_length(write_dead_letter.error) <= 4000 AND write_dead_letter.topic IS NOT NULL
        AND cardinality(write_dead_letter.header_names) = cardinality(write_dead_letter.header_values)
        AND write_dead_letter.payload IS NOT NULL) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: an argument of write_dead_letter is out of range' USING ERRCODE = '22023';
    END IF;
    outcome := 'in-flight';
    IF NOT pg_try_advisory_xact_lock(oncegate.message_lock(write_dead_letter.id)) THEN
        RETURN;
    END IF;
    SELECT t.* INTO r FROM oncegate.receipts AS t WHERE t.id = write_dead_letter.id FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- There is no row, or a purge holds it.
        PERFORM FROM oncegate.receipts AS t WHERE t.id = write_dead_letter.id;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    IF r.state <> 'o' AND clock < r.expires_at THEN
        IF (r.state = 'p' AND r.changed_at = write_dead_letter.received_at) IS NOT TRUE THEN
            outcome := CASE r.state WHEN 'p' THEN 'processed' ELSE 'dead' END;
            known_reason := r.reason;
            RETURN;
        END IF;
    ELSIF write_dead_letter.received_at IS NOT NULL THEN
        outcome := 'open';
        RETURN;
    END IF;
    IF r.id IS NOT NULL THEN
        UPDATE oncegate.receipts AS t SET
                state = 'd', attempts = write_dead_letter.attempts, begun_by = NULL, reason = write_dead_letter.reason, digest = write_dead_letter.digest,
                changed_at = clock, expires_at = ends, purge_at = oncegate.purge_at(t.purge_at, ends, clock)
            WHERE t.id = write_dead_letter.id;
    ELSE
        INSERT INTO oncegate.receipts AS t (id, changed_at, expires_at, purge_at, attempts, state, reason, digest)
            VALUES (write_dead_letter.id, clock, ends, oncegate.purge_at(0, ends, clock), write_dead_letter.attempts, 'd',
                write_dead_letter.reason, write_dead_letter.digest)
            ON CONFLICT ON CONSTRAINT receipts_pkey DO NOTHING;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    outcome := 'written';
    INSERT INTO oncegate.dead_letters AS t (id, consumer, reason, attempts, error, topic, broker_id, order_key, header_names,
            header_values, payload, at)
        VALUES (write_dead_letter.id, write_dead_letter.consumer, write_dead_letter.reason, write_dead_letter.attempts, write_dead_letter.error,
            write_dead_letter.topic, write_dead_letter.broker_id, write_dead_letter.order_key, write_dead_letter.header_names,
            write_dead_letter.header_values, write_dead_letter.payload, clock)
        RETURNING t.number INTO number;
END
$$;

-- Dead letters in the order of their numbers, after this number; of one consumer, or of all consumers if it is null. Returns at
-- most 8 MiB of payloads and headers, or one dead letter. The list ends when a call returns no row.
CREATE OR REPLACE FUNCTION oncegate.list_dead_letters(only_consumer text, after bigint, max_rows integer)
RETURNS TABLE (
    number bigint, id bytea, consumer text, reason text, attempts integer, error text, topic text, broker_id text,
    order_key bytea, header_names text[], header_values bytea[], payload bytea, at bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    bytes bigint := 0;
    d oncegate.dead_letters;
BEGIN
    FOR d IN
        SELECT t.* FROM oncegate.dead_letters AS t
        WHERE t.number > coalesce(list_dead_letters.after, -1)
            AND (list_dead_letters.only_consumer IS NULL OR t.consumer = list_dead_letters.only_consumer)
        ORDER BY t.number
        LIMIT least(greatest(coalesce(list_dead_letters.max_rows, 100), 1), 1000)
    LOOP
        EXIT WHEN bytes >= 8388608;
        bytes := bytes + octet_length(d.payload) + coalesce(
            (SELECT sum(octet_length(h)) FROM unnest(d.header_values) AS u (h)), 0);
        number := d.number; id := d.id; consumer := d.consumer; reason := d.reason; attempts := d.attempts; error := d.error;
        topic := d.topic; broker_id := d.broker_id; order_key := d.order_key; header_names := d.header_names;
        header_values := d.header_values; payload := d.payload; at := d.at;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Takes a dead letter out, and its receipt unless it is to be kept. Returns false if it is gone. OG002: another transaction holds
-- it. No role may call it.
CREATE OR REPLACE FUNCTION oncegate.take_out_dead_letter(d oncegate.dead_letters, keeps_receipt boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM oncegate.dead_letters AS t WHERE t.number = d.number FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.dead_letters AS t WHERE t.number = d.number;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        RAISE EXCEPTION 'oncegate: another transaction holds the dead letter' USING ERRCODE = 'OG002';
    END IF;
    IF NOT pg_try_advisory_xact_lock(oncegate.message_lock(d.id)) THEN
        RAISE EXCEPTION 'oncegate: another transaction holds the message' USING ERRCODE = 'OG002';
    END IF;
    IF NOT take_out_dead_letter.keeps_receipt THEN
        -- A transaction that got `dead` holds the row, and is about to acknowledge the message.
        PERFORM FROM oncegate.receipts AS t WHERE t.id = d.id AND t.state = 'd' FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            DELETE FROM oncegate.receipts AS t WHERE t.id = d.id;
        ELSE
            PERFORM FROM oncegate.receipts AS t WHERE t.id = d.id AND t.state = 'd';
            IF FOUND THEN
                RAISE EXCEPTION 'oncegate: another transaction holds the message' USING ERRCODE = 'OG002';
            END IF;
        END IF;
    END IF;
    DELETE FROM oncegate.dead_letters AS t WHERE t.number = d.number;
    RETURN true;
END
$$;

-- Takes a dead letter out and returns it, so that its message can be processed again: send it again before the transaction
-- commits. No row if there is no such dead letter. Until the commit, the message is in flight for every consumer. OG002:
-- another transaction holds it.
CREATE OR REPLACE FUNCTION oncegate.take_dead_letter(number bigint)
RETURNS TABLE (
    id bytea, consumer text, topic text, broker_id text, order_key bytea, header_names text[], header_values bytea[], payload bytea
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    d oncegate.dead_letters;
BEGIN
    -- A dead letter never changes, so it can be read before it is locked.
    SELECT t.* INTO d FROM oncegate.dead_letters AS t WHERE t.number = take_dead_letter.number;
    IF NOT FOUND OR NOT oncegate.take_out_dead_letter(d, false) THEN
        RETURN;
    END IF;
    PERFORM oncegate.note_message_change('dead-letter', d.number, encode(d.id, 'hex'), d.consumer, d.topic, 'taken', session_user, '');
    id := d.id; consumer := d.consumer; topic := d.topic; broker_id := d.broker_id; order_key := d.order_key;
    header_names := d.header_names; header_values := d.header_values; payload := d.payload;
    RETURN NEXT;
END
$$;

-- Deletes a dead letter. Returns false if there was none, or if another transaction holds it. Its message stays dead until its
-- receipt expires.
CREATE OR REPLACE FUNCTION oncegate.delete_dead_letter(number bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    d oncegate.dead_letters;
BEGIN
    DELETE FROM oncegate.dead_letters AS t WHERE t.number = (
        SELECT l.number FROM oncegate.dead_letters AS l WHERE l.number = delete_dead_letter.number FOR UPDATE SKIP LOCKED)
        RETURNING t.* INTO d;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM oncegate.note_message_change('dead-letter', d.number, encode(d.id, 'hex'), d.consumer, d.topic, 'dropped', session_user, '');
    RETURN true;
END
$$;

-- Removes at most max_rows receipts whose retention is over, 1000 at most, and returns their number. Any number of purges may
-- run at the same time.
CREATE OR REPLACE FUNCTION oncegate.purge_receipts(max_rows integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    began CONSTANT bigint := oncegate.purge_from('receipts', clock);
    place bigint := began;
    purged integer := 0;
    gone integer;
    moved integer;
BEGIN
    FOR turn IN 1..10 LOOP
        EXIT WHEN purged >= least(greatest(purge_receipts.max_rows, 0), 1000);
        WITH due AS (
            SELECT t.id, t.expires_at, t.purge_at FROM oncegate.receipts AS t
            WHERE t.purge_at >= place AND t.purge_at <= clock
            ORDER BY t.purge_at
            LIMIT least(greatest(purge_receipts.max_rows, 0), 1000) - purged
            FOR UPDATE SKIP LOCKED
        ), deleted AS (
            DELETE FROM oncegate.receipts AS t USING due
            WHERE t.id = due.id AND due.expires_at <= clock
            RETURNING 1
        ), noted AS (
            UPDATE oncegate.receipts AS t SET purge_at = oncegate.purge_at(0, t.expires_at, clock) FROM due
            WHERE t.id = due.id AND due.expires_at > clock
            RETURNING 1
        )
        SELECT (SELECT count(*) FROM deleted), (SELECT count(*) FROM noted), coalesce((SELECT max(due.purge_at) FROM due), place)
            INTO gone, moved, place;
        purged := purged + gone;
        EXIT WHEN gone + moved = 0;
    END LOOP;
    IF purge_receipts.max_rows > 0 AND (began = 0 OR place > began) THEN
        PERFORM oncegate.purge_reached('receipts', clock, began, coalesce((SELECT t.purge_at FROM oncegate.receipts AS t
            WHERE t.purge_at >= began ORDER BY t.purge_at LIMIT 1), clock));
    END IF;
    RETURN purged;
END
$$;

-- Takes an event of a stream in the transaction that will hold its effect. Sequences count by one, from `first`. Outcomes:
-- apply, and the position has moved; applied, earlier; busy, if another transaction uses this stream; gap, with the expected
-- sequence. If `event` is given, it is buffered until its turn instead: buffered, or full if max_buffered events are buffered
-- already. is_more: the next event is buffered, and oncegate.take_buffered returns it.
CREATE OR REPLACE FUNCTION oncegate.stream_event(
    consumer text,
    stream text,
    sequence bigint,
    first bigint DEFAULT 1,
    event bytea DEFAULT NULL,
    max_buffered integer DEFAULT 1000,
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
        AND stream_event.sequence < 9223372036854775807 AND stream_event.max_buffered >= 0) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a stream must have a name of 1 to 255 bytes, and sequence must not be below first'
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
    -- This write conflicts with any transaction that moved the position after this transaction's snapshot.
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
        DELETE FROM oncegate.buffered_events AS t WHERE t.consumer = stream_event.consumer
            AND t.stream = stream_event.stream AND t.sequence = stream_event.sequence;
        is_more := EXISTS (SELECT FROM oncegate.buffered_events AS t WHERE t.consumer = stream_event.consumer
            AND t.stream = stream_event.stream AND t.sequence = stream_event.sequence + 1);
        RETURN;
    END IF;
    outcome := 'buffered';
    PERFORM FROM oncegate.buffered_events AS t WHERE t.consumer = stream_event.consumer
        AND t.stream = stream_event.stream AND t.sequence = stream_event.sequence;
    IF FOUND THEN
        RETURN;
    END IF;
    IF (SELECT count(*) FROM (SELECT FROM oncegate.buffered_events AS t WHERE t.consumer = stream_event.consumer
        AND t.stream = stream_event.stream LIMIT stream_event.max_buffered) AS u) >= stream_event.max_buffered
    THEN
        outcome := 'full';
        RETURN;
    END IF;
    INSERT INTO oncegate.buffered_events AS t (consumer, stream, sequence, event, at)
        VALUES (stream_event.consumer, stream_event.stream, stream_event.sequence, stream_event.event, clock);
END
$$;

-- Takes the next event of a stream out of the buffer, to be applied in this transaction, and moves the position. All null if it
-- is not buffered, or if another transaction uses this stream.
CREATE OR REPLACE FUNCTION oncegate.take_buffered(consumer text, stream text, OUT sequence bigint, OUT event bytea, OUT is_more boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(oncegate.stream_lock(take_buffered.consumer, take_buffered.stream)) THEN
        RETURN;
    END IF;
    DELETE FROM oncegate.buffered_events AS t USING oncegate.stream_positions AS s
        WHERE t.consumer = take_buffered.consumer AND t.stream = take_buffered.stream
            AND s.consumer = t.consumer AND s.stream = t.stream AND t.sequence = s.next
        RETURNING t.sequence, t.event INTO sequence, event;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    UPDATE oncegate.stream_positions AS t SET next = take_buffered.sequence + 1, changed_at = oncegate.now_ms()
        WHERE t.consumer = take_buffered.consumer AND t.stream = take_buffered.stream;
    is_more := EXISTS (SELECT FROM oncegate.buffered_events AS t WHERE t.consumer = take_buffered.consumer
        AND t.stream = take_buffered.stream AND t.sequence = take_buffered.sequence + 1);
END
$$;

-- Streams that wait for an event: the expected sequence, the events that are buffered behind it, and the time of the first of
-- them.
CREATE OR REPLACE FUNCTION oncegate.list_gaps(only_consumer text, max_rows integer)
RETURNS TABLE (consumer text, stream text, expected bigint, first_buffered bigint, buffered bigint, since bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p.consumer, p.stream, min(s.next), min(p.sequence), count(*), min(p.at)
    FROM oncegate.buffered_events AS p
    JOIN oncegate.stream_positions AS s ON s.consumer = p.consumer AND s.stream = p.stream
    WHERE only_consumer IS NULL OR p.consumer = only_consumer
    GROUP BY p.consumer, p.stream
    ORDER BY min(p.at)
    LIMIT least(greatest(coalesce(max_rows, 100), 1), 1000)
$$;

-- For operators: sets the event that a stream expects, because an earlier event is lost or because its projection is rebuilt.
-- Deletes the earlier events that are buffered. If the expected event is buffered, oncegate.take_buffered returns it. OG002:
-- another transaction uses this stream.
CREATE OR REPLACE FUNCTION oncegate.set_stream(consumer text, stream text, expected bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(set_stream.consumer) BETWEEN 1 AND 100 AND octet_length(set_stream.stream) BETWEEN 1 AND 255
        AND set_stream.expected >= 0) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a stream must have a name of 1 to 255 bytes, and expected must not be negative' USING ERRCODE = '22023';
    END IF;
    IF NOT pg_try_advisory_xact_lock(oncegate.stream_lock(set_stream.consumer, set_stream.stream)) THEN
        RAISE EXCEPTION 'oncegate: another transaction uses this stream' USING ERRCODE = 'OG002';
    END IF;
    INSERT INTO oncegate.stream_positions AS t (consumer, stream, next, changed_at)
        VALUES (set_stream.consumer, set_stream.stream, set_stream.expected, oncegate.now_ms())
        ON CONFLICT ON CONSTRAINT stream_positions_pkey
        DO UPDATE SET next = excluded.next, changed_at = excluded.changed_at;
    DELETE FROM oncegate.buffered_events AS t WHERE t.consumer = set_stream.consumer AND t.stream = set_stream.stream
        AND t.sequence < set_stream.expected;
END
$$;

