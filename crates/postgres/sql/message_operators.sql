-- Operators: dead letters, and messages of the outbox. Each change by these functions has an entry in the audit trail of
-- messages, and so has each change by oncegate.take_dead_letter, delete_dead_letter, outbox_requeue and outbox_drop: those have
-- the name of the role as the actor, and no reason.

-- Notes a change, in its own transaction. The newest 100 000 entries are kept. No role may call it.
CREATE OR REPLACE FUNCTION oncegate.note_message_change(
    kind text, message bigint, id text, consumer text, topic text, action text, actor text, reason text
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    entry bigint;
BEGIN
    INSERT INTO oncegate.message_audit (at, kind, message, id, consumer, topic, action, actor, reason)
        VALUES (oncegate.now_ms(), note_message_change.kind, note_message_change.message, note_message_change.id,
            note_message_change.consumer, note_message_change.topic, note_message_change.action, note_message_change.actor,
            note_message_change.reason)
        RETURNING number INTO entry;
    -- Entries that another transaction removes now are skipped.
    DELETE FROM oncegate.message_audit AS a WHERE a.number IN (
        SELECT o.number FROM oncegate.message_audit AS o WHERE o.number <= entry - 100000 ORDER BY o.number LIMIT 100
        FOR UPDATE SKIP LOCKED);
END
$$;

CREATE OR REPLACE FUNCTION oncegate.check_audit_texts(actor text, reason text) RETURNS void
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(check_audit_texts.actor) BETWEEN 1 AND 1000 AND octet_length(check_audit_texts.reason) BETWEEN 1 AND 10000) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: a change needs an actor of 1 to 1000 bytes, and a reason of 1 to 10000' USING ERRCODE = '22023';
    END IF;
END
$$;

-- The audit trail of messages, newest entry first, before this number. kind: dead-letter or outbox. action: requeued, dropped,
-- or taken (out by oncegate.take_dead_letter).
CREATE OR REPLACE FUNCTION oncegate.message_audit_trail(before bigint, max_rows integer) RETURNS TABLE (
    number bigint, at bigint, kind text, message bigint, id text, consumer text, topic text, action text, actor text, reason text
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT a.number, a.at, a.kind, a.message, a.id, a.consumer, a.topic, a.action, a.actor, a.reason
    FROM oncegate.message_audit AS a
    WHERE before IS NULL OR a.number < before
    ORDER BY a.number DESC LIMIT least(greatest(max_rows, 0), 1000)
$$;

-- Dead letters without their payloads and headers, the newest first, before this number. Null matches everything.
CREATE OR REPLACE FUNCTION oncegate.dead_letter_page(
    only_consumer text, only_topic text, only_reason text, before bigint, max_rows integer
) RETURNS TABLE (
    number bigint, id bytea, consumer text, reason text, attempts integer, error text, topic text, broker_id text,
    order_key bytea, headers integer, bytes bigint, at bigint, clock bigint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.number, t.id, t.consumer, t.reason, t.attempts, t.error, t.topic, t.broker_id, t.order_key,
        cardinality(t.header_names), octet_length(t.payload)::bigint, t.at, oncegate.now_ms()
    FROM oncegate.dead_letters AS t
    WHERE (dead_letter_page.before IS NULL OR t.number < dead_letter_page.before)
        AND (dead_letter_page.only_consumer IS NULL OR t.consumer = dead_letter_page.only_consumer)
        AND (dead_letter_page.only_topic IS NULL OR t.topic = dead_letter_page.only_topic)
        AND (dead_letter_page.only_reason IS NULL OR t.reason = dead_letter_page.only_reason)
    ORDER BY t.number DESC LIMIT least(greatest(coalesce(dead_letter_page.max_rows, 100), 1), 1000)
$$;

-- Dead letters as oncegate.dead_letter_page returns them, of those that died at `since` or later, and before `until`. Null is no
-- bound. The index by time finds the numbers between which they are, so that only these are read: numbers and times are nearly
-- in the same order. The sum in min and max keeps the planner from looking for them by number.
CREATE OR REPLACE FUNCTION oncegate.dead_letters_of_period(
    only_consumer text, only_topic text, only_reason text, since bigint, until bigint, before bigint, max_rows integer
) RETURNS TABLE (
    number bigint, id bytea, consumer text, reason text, attempts integer, error text, topic text, broker_id text,
    order_key bytea, headers integer, bytes bigint, at bigint, clock bigint
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    from_time CONSTANT bigint := coalesce(dead_letters_of_period.since, -9223372036854775808);
    to_time CONSTANT bigint := coalesce(dead_letters_of_period.until, 9223372036854775807);
    first_number bigint;
    last_number bigint;
BEGIN
    SELECT min(t.number + 0), max(t.number + 0) INTO first_number, last_number
    FROM oncegate.dead_letters AS t WHERE t.at >= from_time AND t.at < to_time;
    RETURN QUERY
        SELECT t.number, t.id, t.consumer, t.reason, t.attempts, t.error, t.topic, t.broker_id, t.order_key,
            cardinality(t.header_names), octet_length(t.payload)::bigint, t.at, oncegate.now_ms()
        FROM oncegate.dead_letters AS t
        WHERE t.number BETWEEN first_number AND last_number AND t.at >= from_time AND t.at < to_time
            AND (dead_letters_of_period.before IS NULL OR t.number < dead_letters_of_period.before)
            AND (dead_letters_of_period.only_consumer IS NULL OR t.consumer = dead_letters_of_period.only_consumer)
            AND (dead_letters_of_period.only_topic IS NULL OR t.topic = dead_letters_of_period.only_topic)
            AND (dead_letters_of_period.only_reason IS NULL OR t.reason = dead_letters_of_period.only_reason)
        ORDER BY t.number DESC LIMIT least(greatest(coalesce(dead_letters_of_period.max_rows, 100), 1), 1000);
END
$$;

-- The numbers of dead letters by consumer, topic and reason, the largest first. It counts rows.
CREATE OR REPLACE FUNCTION oncegate.dead_letter_counts(max_rows integer)
RETURNS TABLE (consumer text, topic text, reason text, letters bigint, oldest bigint, newest bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT t.consumer, t.topic, t.reason, count(*), min(t.at), max(t.at)
    FROM oncegate.dead_letters AS t
    GROUP BY t.consumer, t.topic, t.reason
    ORDER BY count(*) DESC, t.consumer, t.topic, t.reason LIMIT least(greatest(coalesce(dead_letter_counts.max_rows, 100), 1), 1000)
$$;

-- The place of the identity of a dead letter, as far as its receipt reveals it: `header` with its name in lower case, `broker` for
-- an identifier of the broker, or null if the identity is in the payload, or is made by the application.
CREATE OR REPLACE FUNCTION oncegate.dead_letter_identity(d oncegate.dead_letters, OUT place text, OUT name text, OUT value text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found text;
    kinds text[];
BEGIN
    -- Other names have no receipts of messages.
    IF (d.consumer ~ '^[!-~]{1,100}$' COLLATE "C") IS NOT TRUE THEN
        RETURN;
    END IF;
    FOR n IN 1..cardinality(d.header_names) LOOP
        BEGIN
            found := convert_from(d.header_values[n], 'UTF8');
        EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
            found := '';
        END;
        IF found <> '' THEN
            kinds := ARRAY['header', lower(d.header_names[n] COLLATE "C")];
            IF d.id IN (
                oncegate.message_record(d.consumer, found, kinds, ''),
                oncegate.message_record(d.consumer, found, kinds, d.topic),
                oncegate.message_record(d.consumer, found, ARRAY['webhook-id'], ''),
                oncegate.message_record(d.consumer, found, ARRAY['own'], ''),
                oncegate.message_record(d.consumer, found, ARRAY['own'], d.topic))
            THEN
                place := 'header';
                name := kinds[2];
                value := found;
                RETURN;
            END IF;
        END IF;
    END LOOP;
    -- A test of its own: PostgreSQL may evaluate both sides of an AND.
    IF coalesce(d.broker_id, '') = '' THEN
        RETURN;
    END IF;
    IF d.id IN (
        oncegate.message_record(d.consumer, d.broker_id, ARRAY['broker'], ''),
        oncegate.message_record(d.consumer, d.broker_id, ARRAY['broker'], d.topic),
        oncegate.message_record(d.consumer, d.broker_id, ARRAY['own'], ''),
        oncegate.message_record(d.consumer, d.broker_id, ARRAY['own'], d.topic))
    THEN
        place := 'broker';
        value := d.broker_id;
    END IF;
END
$$;

-- The identifier under which the outbox publishes a dead letter: the one that it had, or null for a new one. A publisher for
-- RabbitMQ or NATS also sends it where these two headers come from.
CREATE OR REPLACE FUNCTION oncegate.dead_letter_message_id(d oncegate.dead_letters) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted text;
    found text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['oncegate-message-id', 'amqp-message-id', 'nats-msg-id'] LOOP
        FOR n IN 1..cardinality(d.header_names) LOOP
            IF lower(d.header_names[n] COLLATE "C") = wanted THEN
                BEGIN
                    found := convert_from(d.header_values[n], 'UTF8');
                EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
                    found := '';
                END;
                IF found ~ '^[ -~]{1,255}$' COLLATE "C" THEN
                    RETURN found;
                END IF;
            END IF;
        END LOOP;
    END LOOP;
    RETURN NULL;
END
$$;

-- Returns true for the sealed form of a payload (docs/reference/sealing.md), which only a program with the key can open.
CREATE OR REPLACE FUNCTION oncegate.is_sealed(payload bytea) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN substring(is_sealed.payload FROM 1 FOR 7) = decode('006f677365616c', 'hex');

-- Dead letters and events that streams buffer, counted by the key that sealed them. kind: dead-letter or buffered-event. seal_key:
-- the 8 bytes of the id of the key, or null for those in clear. It reads the first bytes of each payload, and returns at most 1000
-- rows.
CREATE OR REPLACE FUNCTION oncegate.message_seal_counts()
RETURNS TABLE (kind text, seal_key bytea, messages bigint, oldest bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.kind, CASE WHEN oncegate.is_sealed(m.head) THEN substring(m.head FROM 9 FOR 8) END, count(*), min(m.at)
    FROM (
        SELECT 'dead-letter'::text AS kind, substring(t.payload FROM 1 FOR 16) AS head, t.at FROM oncegate.dead_letters AS t
        UNION ALL
        SELECT 'buffered-event'::text, substring(t.event FROM 1 FOR 16), t.at FROM oncegate.buffered_events AS t
    ) AS m
    GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 1000
$$;

-- The reasons why a dead letter should not be published again:
--   sealed           its payload is sealed: published like this, no consumer could read it
--   recent           it is younger than window_ms, for which the broker may drop a message with the same identifier as a copy
--   fails-again      it has no identity, or the identity of another message: unchanged it becomes a dead letter again
--   outcome-unknown  it may have taken effect
--   new-identity     its consumer identifies it by what the broker gives anew to each publication. The outbox may publish it more
--                    than once, and each copy would take effect
--   old              it is older than other consumers of its topic remember it, by their default retention of 7 days
CREATE OR REPLACE FUNCTION oncegate.dead_letter_obstacles(d oncegate.dead_letters, window_ms bigint) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    age CONSTANT bigint := oncegate.now_ms() - d.at;
    obstacles text[] := '{}';
    identity record;
BEGIN
    IF oncegate.is_sealed(d.payload) THEN
        obstacles := obstacles || 'sealed'::text;
    END IF;
    IF age < dead_letter_obstacles.window_ms THEN
        obstacles := obstacles || 'recent'::text;
    END IF;
    IF d.reason IN ('no-identity', 'identity-reused') THEN
        obstacles := obstacles || 'fails-again'::text;
    END IF;
    IF d.reason = 'outcome-unknown' THEN
        obstacles := obstacles || 'outcome-unknown'::text;
    END IF;
    SELECT i.* INTO identity FROM oncegate.dead_letter_identity(d) AS i;
    IF identity.place = 'broker'
        OR identity.name IN ('oncegate-message-id', 'amqp-message-id', 'nats-msg-id')
            AND identity.value IS DISTINCT FROM oncegate.dead_letter_message_id(d)
    THEN
        obstacles := obstacles || 'new-identity'::text;
    END IF;
    IF age > 604800000 THEN
        obstacles := obstacles || 'old'::text;
    END IF;
    RETURN obstacles;
END
$$;

-- One dead letter with everything. identity: the header, or `broker`; see oncegate.dead_letter_identity. obstacles: see
-- oncegate.dead_letter_obstacles.
CREATE OR REPLACE FUNCTION oncegate.show_dead_letter(number bigint, window_ms bigint)
RETURNS TABLE (
    id bytea, consumer text, reason text, attempts integer, error text, topic text, broker_id text, order_key bytea,
    header_names text[], header_values bytea[], payload bytea, at bigint, clock bigint, identity text, obstacles text[]
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    d oncegate.dead_letters;
BEGIN
    SELECT t.* INTO d FROM oncegate.dead_letters AS t WHERE t.number = show_dead_letter.number;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    id := d.id; consumer := d.consumer; reason := d.reason; attempts := d.attempts; error := d.error; topic := d.topic;
    broker_id := d.broker_id; order_key := d.order_key; header_names := d.header_names; header_values := d.header_values;
    payload := d.payload; at := d.at; clock := oncegate.now_ms();
    identity := (SELECT CASE i.place WHEN 'header' THEN 'header ' || i.name ELSE i.place END
        FROM oncegate.dead_letter_identity(d) AS i);
    obstacles := oncegate.dead_letter_obstacles(d, show_dead_letter.window_ms);
    RETURN NEXT;
END
$$;

-- The dead letter with the content that a program with the key has opened. No role may call it.
CREATE OR REPLACE FUNCTION oncegate.opened_dead_letter(d oncegate.dead_letters, payload bytea, header_values bytea[])
RETURNS oncegate.dead_letters
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (oncegate.is_sealed(d.payload) AND opened_dead_letter.payload IS NOT NULL
        AND cardinality(opened_dead_letter.header_values) = cardinality(d.header_names)) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: the dead letter is not sealed, or this is not its content' USING ERRCODE = '22023';
    END IF;
    d.payload := opened_dead_letter.payload;
    d.header_values := opened_dead_letter.header_values;
    RETURN d;
END
$$;

-- The identity and the obstacles of a sealed dead letter, of which a program with the key has opened the content. No row if there is
-- no such dead letter.
CREATE OR REPLACE FUNCTION oncegate.check_opened_dead_letter(
    number bigint, payload bytea, header_values bytea[], window_ms bigint
) RETURNS TABLE (identity text, obstacles text[])
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    d oncegate.dead_letters;
BEGIN
    SELECT t.* INTO d FROM oncegate.dead_letters AS t WHERE t.number = check_opened_dead_letter.number;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    d := oncegate.opened_dead_letter(d, check_opened_dead_letter.payload, check_opened_dead_letter.header_values);
    identity := (SELECT CASE i.place WHEN 'header' THEN 'header ' || i.name ELSE i.place END
        FROM oncegate.dead_letter_identity(d) AS i);
    obstacles := oncegate.dead_letter_obstacles(d, check_opened_dead_letter.window_ms);
    RETURN NEXT;
END
$$;

-- Takes a dead letter out and sends its message through the outbox, in one transaction: a relay publishes it to its topic, and its
-- consumer processes it as new. accepted: obstacles that the operator accepts; `recent`, `fails-again` and `sealed` cannot be
-- accepted. Outcomes: requeued, with the identifier of the message; none; locked, by another transaction; refused, with the
-- obstacles.
--
-- The receipt is removed, so that the message is new again. If the message gets a new identity, the receipt stays, so that a late
-- copy of the first publication is dead as before.
CREATE OR REPLACE FUNCTION oncegate.requeue_dead_letter(
    number bigint, accepted text[], window_ms bigint, actor text, reason text, OUT outcome text, OUT message_id text, OUT obstacles text[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    d oncegate.dead_letters;
BEGIN
    SELECT t.* INTO d FROM oncegate.dead_letters AS t WHERE t.number = requeue_dead_letter.number;
    SELECT r.* INTO outcome, message_id, obstacles FROM oncegate.requeue_as(
        d, requeue_dead_letter.accepted, requeue_dead_letter.window_ms, requeue_dead_letter.actor, requeue_dead_letter.reason) AS r;
END
$$;

-- As requeue_dead_letter, for a sealed dead letter of which a program with the key has opened the content. The database cannot check
-- that this is its content: a role that may call it can send any content to the topic of a sealed dead letter.
CREATE OR REPLACE FUNCTION oncegate.requeue_opened_dead_letter(
    number bigint, payload bytea, header_values bytea[], accepted text[], window_ms bigint, actor text, reason text,
    OUT outcome text, OUT message_id text, OUT obstacles text[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    d oncegate.dead_letters;
BEGIN
    SELECT t.* INTO d FROM oncegate.dead_letters AS t WHERE t.number = requeue_opened_dead_letter.number;
    IF FOUND THEN
        d := oncegate.opened_dead_letter(d, requeue_opened_dead_letter.payload, requeue_opened_dead_letter.header_values);
    END IF;
    SELECT r.* INTO outcome, message_id, obstacles FROM oncegate.requeue_as(
        d, requeue_opened_dead_letter.accepted, requeue_opened_dead_letter.window_ms, requeue_opened_dead_letter.actor,
        requeue_opened_dead_letter.reason) AS r;
END
$$;

-- Takes the dead letter with this number out, and sends this message. No role may call it.
CREATE OR REPLACE FUNCTION oncegate.requeue_as(
    d oncegate.dead_letters, accepted text[], window_ms bigint, actor text, reason text, OUT outcome text, OUT message_id text,
    OUT obstacles text[]
)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    all_obstacles text[];
    is_taken boolean;
BEGIN
    PERFORM oncegate.check_audit_texts(requeue_as.actor, requeue_as.reason);
    IF (requeue_as.window_ms BETWEEN 0 AND 604800000) IS NOT TRUE THEN
        RAISE EXCEPTION 'oncegate: window_ms must be from 0 to 604800000' USING ERRCODE = '22023';
    END IF;
    IF d.number IS NULL THEN
        outcome := 'none';
        RETURN;
    END IF;
    all_obstacles := oncegate.dead_letter_obstacles(d, requeue_as.window_ms);
    obstacles := ARRAY(SELECT o FROM unnest(all_obstacles) AS u (o)
        WHERE o IN ('sealed', 'recent', 'fails-again') OR o <> ALL (coalesce(requeue_as.accepted, '{}')));
    IF cardinality(obstacles) > 0 THEN
        outcome := 'refused';
        RETURN;
    END IF;
    BEGIN
        is_taken := oncegate.take_out_dead_letter(d, 'new-identity' = ANY (all_obstacles));
    EXCEPTION WHEN SQLSTATE 'OG002' THEN
        outcome := 'locked';
        RETURN;
    END;
    IF NOT is_taken THEN
        outcome := 'none';
        RETURN;
    END IF;
    message_id := oncegate.send(d.topic, d.payload, d.order_key, d.header_names, d.header_values, oncegate.dead_letter_message_id(d));
    outcome := 'requeued';
    PERFORM oncegate.note_message_change('dead-letter', d.number, encode(d.id, 'hex'), d.consumer, d.topic, 'requeued',
        requeue_as.actor, requeue_as.reason);
END
$$;

-- Deletes a dead letter. Its message stays dead until its receipt expires. Outcomes: dropped; none; locked, by another transaction.
CREATE OR REPLACE FUNCTION oncegate.drop_dead_letter(number bigint, actor text, reason text, OUT outcome text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    d oncegate.dead_letters;
BEGIN
    PERFORM oncegate.check_audit_texts(drop_dead_letter.actor, drop_dead_letter.reason);
    DELETE FROM oncegate.dead_letters AS t WHERE t.number = (
        SELECT l.number FROM oncegate.dead_letters AS l WHERE l.number = drop_dead_letter.number FOR UPDATE SKIP LOCKED)
        RETURNING t.* INTO d;
    IF NOT FOUND THEN
        PERFORM FROM oncegate.dead_letters AS t WHERE t.number = drop_dead_letter.number;
        outcome := CASE WHEN FOUND THEN 'locked' ELSE 'none' END;
        RETURN;
    END IF;
    outcome := 'dropped';
    PERFORM oncegate.note_message_change('dead-letter', d.number, encode(d.id, 'hex'), d.consumer, d.topic, 'dropped',
        drop_dead_letter.actor, drop_dead_letter.reason);
END
$$;

-- The state of a message of the outbox: refused; failing, if an attempt has failed; otherwise waiting.
CREATE OR REPLACE FUNCTION oncegate.outbox_state(refused_at bigint, attempts integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN outbox_state.refused_at IS NOT NULL THEN 'refused' WHEN outbox_state.attempts > 0 THEN 'failing' ELSE 'waiting' END;

-- Messages of the outbox without their payloads and headers, in the order of their seq, after this one; of one state, or of all
-- states if it is null. Only refused messages have an index for it: for others it reads the whole outbox. is_held: a relay
-- publishes it now. blocks_key: it is refused, and messages with its order key wait behind it.
CREATE OR REPLACE FUNCTION oncegate.outbox_page(only_state text, after bigint, max_rows integer)
RETURNS TABLE (
    seq bigint, id text, topic text, order_key bytea, headers integer, bytes bigint, state text, created_at bigint,
    refused_at bigint, attempts integer, error text, is_held boolean, blocks_key boolean, clock bigint
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    clock := oncegate.now_ms();
    IF outbox_page.only_state = 'refused' THEN
        RETURN QUERY SELECT o.seq, o.id, o.topic, o.order_key, cardinality(o.header_names), octet_length(o.payload)::bigint,
                'refused'::text, o.created_at, o.refused_at, o.attempts, o.error, false, NOT o.is_aside, outbox_page.clock
            FROM oncegate.outbox AS o
            WHERE o.refused_at IS NOT NULL AND o.seq > coalesce(outbox_page.after, -1)
            ORDER BY o.seq LIMIT least(greatest(coalesce(outbox_page.max_rows, 100), 1), 1000);
        RETURN;
    END IF;
    RETURN QUERY SELECT o.seq, o.id, o.topic, o.order_key, cardinality(o.header_names), octet_length(o.payload)::bigint,
            oncegate.outbox_state(o.refused_at, o.attempts), o.created_at, o.refused_at, o.attempts, o.error,
            o.refused_at IS NULL AND o.token IS NOT NULL AND o.free_at > outbox_page.clock,
            o.refused_at IS NOT NULL AND NOT o.is_aside, outbox_page.clock
        FROM oncegate.outbox AS o
        WHERE o.seq > coalesce(outbox_page.after, -1)
            AND (outbox_page.only_state IS NULL OR outbox_page.only_state = oncegate.outbox_state(o.refused_at, o.attempts))
        ORDER BY o.seq LIMIT least(greatest(coalesce(outbox_page.max_rows, 100), 1), 1000);
END
$$;

-- One message of the outbox with everything.
CREATE OR REPLACE FUNCTION oncegate.show_outbox_message(seq bigint)
RETURNS TABLE (
    id text, topic text, order_key bytea, header_names text[], header_values bytea[], payload bytea, state text,
    created_at bigint, refused_at bigint, attempts integer, error text, is_held boolean, blocks_key boolean, clock bigint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT o.id, o.topic, o.order_key, o.header_names, o.header_values, o.payload,
        oncegate.outbox_state(o.refused_at, o.attempts), o.created_at, o.refused_at, o.attempts, o.error,
        o.refused_at IS NULL AND o.token IS NOT NULL AND o.free_at > c.now, o.refused_at IS NOT NULL AND NOT o.is_aside, c.now
    FROM oncegate.outbox AS o, (SELECT oncegate.now_ms() AS now) AS c
    WHERE o.seq = show_outbox_message.seq
$$;

-- Publishes a refused message again, at its place in its line. Outcomes: requeued; none; not-refused, with its state.
CREATE OR REPLACE FUNCTION oncegate.requeue_outbox_message(
    seq bigint, actor text, reason text, OUT outcome text, OUT state text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    o oncegate.outbox;
BEGIN
    PERFORM oncegate.check_audit_texts(requeue_outbox_message.actor, requeue_outbox_message.reason);
    UPDATE oncegate.outbox AS t SET refused_at = NULL, is_aside = false, free_at = 0, token = NULL
        WHERE t.refused_at IS NOT NULL AND t.seq = requeue_outbox_message.seq
        RETURNING t.* INTO o;
    IF FOUND THEN
        outcome := 'requeued';
        PERFORM oncegate.note_message_change('outbox', o.seq, o.id, NULL, o.topic, outcome, requeue_outbox_message.actor,
            requeue_outbox_message.reason);
        RETURN;
    END IF;
    SELECT oncegate.outbox_state(t.refused_at, t.attempts) INTO state FROM oncegate.outbox AS t
        WHERE t.seq = requeue_outbox_message.seq;
    outcome := CASE WHEN FOUND THEN 'not-refused' ELSE 'none' END;
END
$$;

-- Deletes a refused message, which is then never published. Outcomes: dropped; none; not-refused, with its state.
CREATE OR REPLACE FUNCTION oncegate.drop_outbox_message(
    seq bigint, actor text, reason text, OUT outcome text, OUT state text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    o oncegate.outbox;
BEGIN
    PERFORM oncegate.check_audit_texts(drop_outbox_message.actor, drop_outbox_message.reason);
    DELETE FROM oncegate.outbox AS t WHERE t.refused_at IS NOT NULL AND t.seq = drop_outbox_message.seq RETURNING t.* INTO o;
    IF FOUND THEN
        outcome := 'dropped';
        PERFORM oncegate.note_message_change('outbox', o.seq, o.id, NULL, o.topic, outcome, drop_outbox_message.actor,
            drop_outbox_message.reason);
        RETURN;
    END IF;
    SELECT oncegate.outbox_state(t.refused_at, t.attempts) INTO state FROM oncegate.outbox AS t
        WHERE t.seq = drop_outbox_message.seq;
    outcome := CASE WHEN FOUND THEN 'not-refused' ELSE 'none' END;
END
$$;

