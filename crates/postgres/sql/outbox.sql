-- The outbox. A message is a row that the business transaction inserts, and relays publish committed rows. No call waits for a
-- lock that outlives another call:
--   * sending inserts a row, and nothing else;
--   * a relay takes rows with FOR UPDATE SKIP LOCKED and holds them by a lease; no transaction is open while it publishes.
--
-- Rows form lines. The rows of one topic with one order key are a line, in the order of their seq; a row without an order key
-- is a line of its own. The relay that holds the lease of a line's first row owns the line. It publishes a run: the first row
-- and rows behind it, each after the one before was confirmed. Confirmed rows are deleted, so the first row of a line is always
-- the next to publish, whatever its seq: no row is skipped because a smaller seq was committed later.

-- A UUID of version 7: 48 bits of time, and 74 random bits.
CREATE OR REPLACE FUNCTION oncegate.message_id(clock bigint) RETURNS text
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN encode(overlay(uuid_send(gen_random_uuid()) PLACING substring(int8send(message_id.clock) FROM 3)
    || set_byte(decode('00', 'hex'), 0, floor(random() * 16)::integer + 112) FROM 1), 'hex')::uuid::text;

CREATE OR REPLACE FUNCTION oncegate.outbox_line(topic text, order_key bytea, seq bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN outbox_line.order_key IS NULL THEN outbox_line.seq
    ELSE hashtextextended(encode(outbox_line.order_key, 'hex'), hashtextextended(outbox_line.topic, 1869968496))
        | (-9223372036854775808)::bigint END;

-- The token of a lease. It contains the time: if a standby that was behind takes over, the sequences repeat numbers, and a
-- confirmation of an earlier row must not be taken for one of the row that has its number now.
CREATE OR REPLACE FUNCTION oncegate.outbox_lease(clock bigint) RETURNS bigint
LANGUAGE sql VOLATILE
RETURN outbox_lease.clock * 1048576 + nextval('oncegate.outbox_token') % 1048576;

-- The size of a message on the wire. pg_column_size would return its compressed size.
CREATE OR REPLACE FUNCTION oncegate.outbox_bytes(payload bytea, header_names text[], header_values bytea[]) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN octet_length(outbox_bytes.payload)::bigint + octet_length(array_to_string(outbox_bytes.header_names, ''))
    + octet_length(array_send(outbox_bytes.header_values)) + 8 * cardinality(outbox_bytes.header_names);

-- Writes a message that is published if the transaction commits. Returns its identifier: the one given, or a new one.
CREATE OR REPLACE FUNCTION oncegate.send(
    topic text,
    payload bytea,
    order_key bytea DEFAULT NULL,
    header_names text[] DEFAULT NULL,
    header_values bytea[] DEFAULT NULL,
    id text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    number CONSTANT bigint := nextval('oncegate.outbox_seq');
    message_id CONSTANT text := coalesce(send.id, oncegate.message_id(clock));
    names CONSTANT text[] := coalesce(send.header_names, '{}');
    contents CONSTANT bytea[] := coalesce(send.header_values, '{}');
BEGIN
    IF (octet_length(send.topic) BETWEEN 1 AND 1024 AND send.topic !~ '[[:cntrl:]]' COLLATE "C") IS NOT TRUE THEN
        RAISE EXCEPTION 'oncegate: topic must have 1 to 1024 bytes and no control characters' USING ERRCODE = '22023';
    END IF;
    IF (octet_length(send.payload) <= 67108864) IS NOT TRUE THEN
        RAISE EXCEPTION 'oncegate: payload must not be null, and must have at most 64 MiB' USING ERRCODE = '22023';
    END IF;
    IF octet_length(send.order_key) > 1024 THEN
        RAISE EXCEPTION 'oncegate: order_key must have at most 1024 bytes' USING ERRCODE = '22023';
    END IF;
    IF octet_length(message_id) NOT BETWEEN 1 AND 255 OR octet_length(message_id) <> length(message_id)
        OR message_id ~ '[[:cntrl:]]' COLLATE "C"
    THEN
        RAISE EXCEPTION 'oncegate: id must have 1 to 255 characters of printable ASCII' USING ERRCODE = '22023';
    END IF;
    IF cardinality(names) <> cardinality(contents) OR cardinality(names) > 1000 OR coalesce(array_ndims(names), 1) > 1
        OR coalesce(array_ndims(contents), 1) > 1 OR array_position(names, NULL) IS NOT NULL OR array_position(names, '') IS NOT NULL
        OR array_position(contents, NULL) IS NOT NULL OR oncegate.outbox_bytes('', names, contents) > 1048576
    THEN
        RAISE EXCEPTION 'oncegate: header_names and header_values must be of one length, at most 1000 and 1 MiB, without null'
            USING ERRCODE = '22023';
    END IF;
    INSERT INTO oncegate.outbox (seq, line, created_at, id, topic, order_key, header_names, header_values, payload)
        VALUES (number, oncegate.outbox_line(send.topic, send.order_key, number), clock, message_id, send.topic, send.order_key,
            names, contents, send.payload);
    RETURN message_id;
END
$$;

-- The same for a text payload, such as JSON, with headers as a JSON object of strings.
CREATE OR REPLACE FUNCTION oncegate.send_text(
    topic text,
    payload text,
    order_key text DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    id text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    names text[];
    contents bytea[];
BEGIN
    IF send_text.headers IS NOT NULL THEN
        IF jsonb_typeof(send_text.headers) <> 'object'
            OR EXISTS (SELECT FROM jsonb_each(send_text.headers) AS h WHERE jsonb_typeof(h.value) <> 'string')
        THEN
            RAISE EXCEPTION 'oncegate: headers must be a JSON object of strings' USING ERRCODE = '22023';
        END IF;
        SELECT array_agg(h.key), array_agg(convert_to(h.value, 'UTF8')) INTO names, contents
            FROM jsonb_each_text(send_text.headers) AS h;
    END IF;
    RETURN oncegate.send(send_text.topic, convert_to(send_text.payload, 'UTF8'), convert_to(send_text.order_key, 'UTF8'),
        names, contents, send_text.id);
END
$$;

-- For relays: takes runs of free lines after the line `after` (null: from the first line), under one token, for lease_ms.
-- Returns the rows of each run one after the other; the lease belongs to the first row. Reads at most 1000 lines. If the last
-- row has no seq, it is not a message: there may be more rows after its line. Without such a row, the end was reached.
CREATE OR REPLACE FUNCTION oncegate.outbox_take(
    after bigint,
    max_rows integer,
    max_bytes bigint,
    max_run integer,
    lease_ms bigint
) RETURNS TABLE (
    token bigint,
    line bigint,
    seq bigint,
    id text,
    topic text,
    order_key bytea,
    header_names text[],
    header_values bytea[],
    payload bytea,
    created_at bigint,
    attempts integer
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    -- Rows must be read in the order of the primary key, up to the first live row. The statistics count only live rows. So
    -- while an old snapshot keeps deleted rows, the planner would otherwise read and sort all of them for each line.
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    -- No lease is longer. A later end means that the lease began before the clock was set back.
    latest_end CONSTANT bigint := clock + 3600000;
    -- The smallest line that was not looked at yet.
    place bigint := coalesce(nullif(outbox_take.after, 9223372036854775807) + 1, (-9223372036854775808)::bigint);
    looked integer := 0;
    rows_left integer := outbox_take.max_rows;
    bytes_left bigint := outbox_take.max_bytes;
    is_full boolean := false;
    lines bigint[] := '{}';
    seqs bigint[] := '{}';
    taken bigint;
    h record;
    m record;
    n integer;
    size bigint;
    first bigint;
    upto bigint;
BEGIN
    IF (outbox_take.max_rows BETWEEN 1 AND 10000 AND outbox_take.max_run BETWEEN 1 AND 10000 AND outbox_take.max_bytes > 0
        AND coalesce(outbox_take.after, 0) < 9223372036854775807) IS NOT TRUE
    THEN
        RAISE EXCEPTION 'oncegate: max_rows and max_run must be from 1 to 10000, max_bytes above 0, and after below the greatest bigint'
            USING ERRCODE = '22023';
    END IF;
    PERFORM oncegate.check_duration('lease_ms', outbox_take.lease_ms, 3600000);

    -- Lines with an order key, one by one.
    WHILE place < 0 AND looked < 1000 AND NOT is_full LOOP
        SELECT o.line, o.seq, o.free_at, o.refused_at INTO h FROM oncegate.outbox AS o
            WHERE o.is_aside = false AND o.line >= place AND o.line < 0 ORDER BY o.line, o.seq LIMIT 1;
        IF NOT FOUND THEN
            place := 0;
            EXIT;
        END IF;
        looked := looked + 1;
        IF h.free_at NOT BETWEEN clock + 1 AND latest_end AND h.refused_at IS NULL THEN
            SELECT o.seq INTO h.seq FROM oncegate.outbox AS o
                WHERE o.is_aside = false AND o.line = h.line AND o.seq = h.seq
                    AND o.free_at NOT BETWEEN clock + 1 AND latest_end AND o.refused_at IS NULL
                FOR UPDATE SKIP LOCKED;
            IF FOUND THEN
                -- This read follows the lock, so it does not see rows that the previous holder deleted. If a smaller seq was
                -- committed meanwhile, the locked row is no longer the first one: the line is left to the next call.
                n := 0;
                FOR m IN
                    SELECT o.*, oncegate.outbox_bytes(o.payload, o.header_names, o.header_values) AS size
                    FROM oncegate.outbox AS o WHERE o.is_aside = false AND o.line = h.line ORDER BY o.seq LIMIT outbox_take.max_run
                LOOP
                    EXIT WHEN n = 0 AND m.seq <> h.seq;
                    -- A row that was held, failed or refused by itself begins a run of its own.
                    EXIT WHEN n > 0 AND (m.token IS NOT NULL OR m.free_at > clock OR m.refused_at IS NOT NULL);
                    IF rows_left = 0 OR m.size > bytes_left AND rows_left < outbox_take.max_rows THEN
                        is_full := true;
                        EXIT;
                    END IF;
                    IF n = 0 THEN
                        taken := coalesce(taken, oncegate.outbox_lease(clock));
                        lines := lines || m.line;
                        seqs := seqs || m.seq;
                    END IF;
                    n := n + 1;
                    rows_left := rows_left - 1;
                    bytes_left := bytes_left - m.size;
                    token := taken;
                    line := m.line;
                    seq := m.seq;
                    id := m.id;
                    topic := m.topic;
                    order_key := m.order_key;
                    header_names := m.header_names;
                    header_values := m.header_values;
                    payload := m.payload;
                    created_at := m.created_at;
                    attempts := m.attempts;
                    RETURN NEXT;
                END LOOP;
                EXIT WHEN is_full AND n = 0;
            END IF;
        END IF;
        place := h.line + 1;
    END LOOP;

    -- Lines without an order key, together.
    IF place >= 0 AND looked < 1000 AND NOT is_full THEN
        -- Steps over deleted rows in front of the first line once, and not again below.
        SELECT min(o.line), max(o.line), count(*) INTO first, upto, n FROM (
            SELECT o.line FROM oncegate.outbox AS o WHERE o.is_aside = false AND o.line >= place ORDER BY o.line
            LIMIT 1000 - looked
        ) AS o;
        looked := looked + n;
        FOR m IN
            SELECT o.*, oncegate.outbox_bytes(o.payload, o.header_names, o.header_values) AS size
            FROM oncegate.outbox AS o
            WHERE o.is_aside = false AND o.line >= first AND o.line <= upto
                AND o.free_at NOT BETWEEN clock + 1 AND latest_end AND o.refused_at IS NULL
            ORDER BY o.line, o.seq LIMIT rows_left + 1
            FOR UPDATE SKIP LOCKED
        LOOP
            IF rows_left = 0 OR m.size > bytes_left AND rows_left < outbox_take.max_rows THEN
                is_full := true;
                EXIT;
            END IF;
            taken := coalesce(taken, oncegate.outbox_lease(clock));
            lines := lines || m.line;
            seqs := seqs || m.seq;
            rows_left := rows_left - 1;
            bytes_left := bytes_left - m.size;
            place := m.line + 1;
            token := taken;
            line := m.line;
            seq := m.seq;
            id := m.id;
            topic := m.topic;
            order_key := NULL;
            header_names := m.header_names;
            header_values := m.header_values;
            payload := m.payload;
            created_at := m.created_at;
            attempts := m.attempts;
            RETURN NEXT;
        END LOOP;
        place := CASE WHEN is_full THEN place ELSE coalesce(upto + 1, place) END;
    END IF;

    IF taken IS NOT NULL THEN
        UPDATE oncegate.outbox AS o SET token = taken, free_at = clock + outbox_take.lease_ms
            FROM unnest(lines, seqs) AS k (line, seq)
            WHERE o.is_aside = false AND o.line = k.line AND o.seq = k.seq;
    END IF;
    IF is_full OR looked >= 1000 THEN
        token := NULL;
        line := place - 1;
        seq := NULL;
        id := NULL;
        topic := NULL;
        order_key := NULL;
        header_names := NULL;
        header_values := NULL;
        payload := NULL;
        created_at := NULL;
        attempts := NULL;
        RETURN NEXT;
    END IF;
END
$$;

-- For relays: renews the leases of runs, each identified by its token and its first row. Returns the lines that the relay still
-- owns.
CREATE OR REPLACE FUNCTION oncegate.outbox_renew(tokens bigint[], lines bigint[], seqs bigint[], lease_ms bigint) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
BEGIN
    PERFORM oncegate.check_duration('lease_ms', outbox_renew.lease_ms, 3600000);
    RETURN QUERY UPDATE oncegate.outbox AS o SET free_at = clock + outbox_renew.lease_ms
        FROM unnest(outbox_renew.tokens, outbox_renew.lines, outbox_renew.seqs) AS k (token, line, seq)
        WHERE o.is_aside = false AND o.line = k.line AND o.seq = k.seq AND o.token = k.token
        RETURNING o.line;
END
$$;

-- For relays: settles runs, each identified by its token and its first row, with the outcomes of their rows, and frees their
-- lines. An outcome is `confirmed`; `retry`, after a delay and with an error; `refused`, with an error, and the line waits; or
-- `aside`, refused while the line goes on. Rows without an outcome stay as they are. Returns the lines that the relay still
-- owned; other lines are not changed.
CREATE OR REPLACE FUNCTION oncegate.outbox_settle(
    tokens bigint[],
    lines bigint[],
    seqs bigint[],
    row_lines bigint[],
    row_seqs bigint[],
    outcomes text[],
    delays_ms bigint[],
    errors text[]
) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    held bigint[];
BEGIN
    IF EXISTS (SELECT FROM unnest(outbox_settle.outcomes) AS o WHERE o IS NULL OR o NOT IN ('confirmed', 'retry', 'refused', 'aside'))
    THEN
        RAISE EXCEPTION 'oncegate: an outcome must be confirmed, retry, refused or aside' USING ERRCODE = '22023';
    END IF;
    -- The token decides the ownership, not the time: an expired lease that no other relay took is still good.
    SELECT array_agg(o.line) INTO held FROM (
        SELECT o.line FROM unnest(outbox_settle.tokens, outbox_settle.lines, outbox_settle.seqs) AS k (token, line, seq)
            JOIN oncegate.outbox AS o ON o.is_aside = false AND o.line = k.line AND o.seq = k.seq AND o.token = k.token
            ORDER BY o.line FOR UPDATE OF o
    ) AS o;
    IF held IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM oncegate.outbox AS o
        USING unnest(outbox_settle.row_lines, outbox_settle.row_seqs, outbox_settle.outcomes) AS k (line, seq, outcome)
        WHERE k.outcome = 'confirmed' AND o.is_aside = false AND o.line = k.line AND o.seq = k.seq AND o.line = ANY (held);
    UPDATE oncegate.outbox AS o SET
            attempts = least(o.attempts::bigint + 1, 2147483647)::integer,
            token = NULL,
            error = left(k.error, 1000),
            free_at = CASE WHEN k.outcome = 'retry' THEN clock + least(greatest(coalesce(k.delay_ms, 0), 0), 3600000) ELSE 0 END,
            refused_at = CASE WHEN k.outcome <> 'retry' THEN clock END,
            -- No row waits behind one without an order key.
            is_aside = k.outcome = 'aside' OR k.outcome = 'refused' AND o.line >= 0
        FROM unnest(outbox_settle.row_lines, outbox_settle.row_seqs, outbox_settle.outcomes, outbox_settle.delays_ms,
            outbox_settle.errors) AS k (line, seq, outcome, delay_ms, error)
        WHERE k.outcome <> 'confirmed' AND o.is_aside = false AND o.line = k.line AND o.seq = k.seq AND o.line = ANY (held);
    -- First rows without an outcome.
    UPDATE oncegate.outbox AS o SET token = NULL, free_at = 0
        FROM unnest(outbox_settle.tokens, outbox_settle.lines, outbox_settle.seqs) AS k (token, line, seq)
        WHERE o.is_aside = false AND o.line = k.line AND o.seq = k.seq AND o.token = k.token;
    RETURN QUERY SELECT unnest(held);
END
$$;

-- For operators: refused messages, in the order of their seq.
CREATE OR REPLACE FUNCTION oncegate.outbox_refused(after bigint DEFAULT NULL, max_rows integer DEFAULT 100)
RETURNS TABLE (
    seq bigint,
    id text,
    topic text,
    order_key bytea,
    bytes integer,
    created_at bigint,
    refused_at bigint,
    attempts integer,
    error text,
    blocks_key boolean
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT o.seq, o.id, o.topic, o.order_key, octet_length(o.payload), o.created_at, o.refused_at, o.attempts, o.error,
        NOT o.is_aside
    FROM oncegate.outbox AS o
    WHERE o.refused_at IS NOT NULL AND o.seq > coalesce(outbox_refused.after, -1)
    ORDER BY o.seq LIMIT least(greatest(outbox_refused.max_rows, 1), 10000);
$$;

-- For operators: publishes a refused message again, at its place in its line. Returns false if there is no such message.
CREATE OR REPLACE FUNCTION oncegate.outbox_requeue(seq bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m oncegate.outbox;
BEGIN
    UPDATE oncegate.outbox AS o SET refused_at = NULL, is_aside = false, free_at = 0, token = NULL
        WHERE o.refused_at IS NOT NULL AND o.seq = outbox_requeue.seq
        RETURNING o.* INTO m;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM oncegate.note_message_change('outbox', m.seq, m.id, NULL, m.topic, 'requeued', session_user, '');
    RETURN true;
END
$$;

-- For operators: deletes a refused message, which is then never published. Returns false if there is no such message.
CREATE OR REPLACE FUNCTION oncegate.outbox_drop(seq bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    m oncegate.outbox;
BEGIN
    DELETE FROM oncegate.outbox AS o WHERE o.refused_at IS NOT NULL AND o.seq = outbox_drop.seq RETURNING o.* INTO m;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM oncegate.note_message_change('outbox', m.seq, m.id, NULL, m.topic, 'dropped', session_user, '');
    RETURN true;
END
$$;

-- The numbers of waiting, failing and refused messages, and the age of the oldest waiting one (null if there is none). It
-- counts rows, so it takes a while if there are many.
CREATE OR REPLACE FUNCTION oncegate.outbox_status(
    OUT waiting bigint,
    OUT oldest_ms bigint,
    OUT failing bigint,
    OUT refused bigint
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT count(*) FILTER (WHERE o.refused_at IS NULL),
        -- Not with greatest, which would turn null into 0.
        oncegate.now_ms() - min(least(o.created_at, oncegate.now_ms())) FILTER (WHERE o.refused_at IS NULL),
        count(*) FILTER (WHERE o.refused_at IS NULL AND o.attempts > 0),
        count(*) FILTER (WHERE o.refused_at IS NOT NULL)
    FROM oncegate.outbox AS o;
$$;

