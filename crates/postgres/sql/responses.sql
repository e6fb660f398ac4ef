-- Responses in the published encoding: stores read them, and sidecars send them. Functions that callers may be granted run as
-- the owner, because they call other functions here.

-- Returns true if the fields of a response with at least 7 bytes are complete, at most 256, and have names in ASCII.
CREATE OR REPLACE FUNCTION oncegate.has_whole_fields(response bytea) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    size CONSTANT integer := octet_length(response);
    fields CONSTANT integer :=
        get_byte(response, 3) * 256 + get_byte(response, 4) + get_byte(response, 5) * 256 + get_byte(response, 6);
    place integer := 7;
    name_size integer;
    value_size bigint;
BEGIN
    IF fields > 256 THEN
        RETURN false;
    END IF;
    FOR n IN 1..fields LOOP
        IF place + 6 > size THEN
            RETURN false;
        END IF;
        name_size := get_byte(response, place) * 256 + get_byte(response, place + 1);
        value_size := get_byte(response, place + 2)::bigint * 16777216 + get_byte(response, place + 3) * 65536
            + get_byte(response, place + 4) * 256 + get_byte(response, place + 5);
        -- `escape` makes bytes that are not ASCII longer.
        IF place + 6 + name_size + value_size > size
            OR length(encode(substr(response, place + 7, name_size), 'escape')) <> name_size
        THEN
            RETURN false;
        END IF;
        place := place + 6 + name_size + value_size;
    END LOOP;
    RETURN true;
END
$$;

-- Returns true if a store can read the bytes as a response in the published encoding, version 1: at most 64 MiB, a final
-- status, and complete fields with names in ASCII. oncegate.is_response checks more.
--
-- Most responses have one field, a content type. They are checked here, where the planner puts the expression into the
-- statement of the caller: the call of a function with a loop takes longer than the insertion of a record. The first comparison
-- is of the version and the status (200 to 999), the next two say that there is one header field and no trailer, with a name of less
-- than 256 bytes and a value of less than 65536.
CREATE OR REPLACE FUNCTION oncegate.may_be_response(response bytea) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN (octet_length(response) BETWEEN 7 AND 67108864
        AND substr(response, 1, 3) BETWEEN decode('0100c8', 'hex') AND decode('0103e7', 'hex')) IS NOT TRUE
        THEN false
    WHEN octet_length(response) >= 13 AND substr(response, 4, 5) = decode('0001000000', 'hex')
        AND substr(response, 10, 2) = decode('0000', 'hex')
        THEN 13 + get_byte(response, 8) + get_byte(response, 11) * 256 + get_byte(response, 12) <= octet_length(response)
            AND length(encode(substr(response, 14, get_byte(response, 8)), 'escape')) = get_byte(response, 8)
    ELSE oncegate.has_whole_fields(response)
END;

-- Returns true if these are the name, in lower case, and the value of an HTTP field (RFC 9110, sections 5.1 and 5.5).
CREATE OR REPLACE FUNCTION oncegate.is_field(name bytea, value bytea) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN encode(is_field.name, 'escape') ~ '^[-!#$%&''*+.^_`|~0-9a-z]+$' COLLATE "C"
    AND translate(encode(is_field.value, 'escape'), chr(9), '') !~ '[[:cntrl:]]' COLLATE "C"
    AND position(decode('00', 'hex') IN is_field.value) = 0;

-- Encodes a response, for callers without a library for the published encoding, version 1:
-- u8 version | u16 status | u16 header fields | u16 trailer fields | (u16 name length, u32 value length, name, value)* | body
CREATE OR REPLACE FUNCTION oncegate.response(status integer, header_names text[], header_values text[], body bytea) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    fields integer := coalesce(array_length(header_names, 1), 0);
    encoded bytea;
    field_name bytea;
    field_value bytea;
BEGIN
    IF status IS NULL OR status NOT BETWEEN 200 AND 999 OR fields > 256
        OR fields <> coalesce(array_length(header_values, 1), 0)
        OR array_ndims(header_names) > 1 OR array_ndims(header_values) > 1
    THEN
        RAISE EXCEPTION 'oncegate: a response must have a status from 200 to 999, and at most 256 header names with as many values'
            USING ERRCODE = '22023';
    END IF;
    encoded := decode('01', 'hex') || int2send(status::smallint) || int2send(fields::smallint) || int2send(0::smallint);
    FOR n IN 1..fields LOOP
        field_name := convert_to(lower(header_names[n] COLLATE "C"), 'UTF8');
        field_value := convert_to(header_values[n], 'UTF8');
        IF (octet_length(field_name) <= 32767 AND oncegate.is_field(field_name, field_value)) IS NOT TRUE THEN
            RAISE EXCEPTION 'oncegate: a header field must have a token as its name, and a value without control characters' USING ERRCODE = '22023';
        END IF;
        encoded := encoded || int2send(octet_length(field_name)::smallint) || int4send(octet_length(field_value))
            || field_name || field_value;
    END LOOP;
    RETURN encoded || coalesce(body, ''::bytea);
END
$$;

-- Returns true if the bytes are a response in the published encoding that can be sent over HTTP.
CREATE OR REPLACE FUNCTION oncegate.is_response(response bytea) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    place integer := 7;
    name_size integer;
    value_size integer;
BEGIN
    IF NOT oncegate.may_be_response(response) THEN
        RETURN false;
    END IF;
    FOR n IN 1..get_byte(response, 3) * 256 + get_byte(response, 4) + get_byte(response, 5) * 256 + get_byte(response, 6) LOOP
        name_size := get_byte(response, place) * 256 + get_byte(response, place + 1);
        value_size := get_byte(response, place + 2) * 16777216 + get_byte(response, place + 3) * 65536
            + get_byte(response, place + 4) * 256 + get_byte(response, place + 5);
        IF NOT oncegate.is_field(substr(response, place + 7, name_size), substr(response, place + 7 + name_size, value_size)) THEN
            RETURN false;
        END IF;
        place := place + 6 + name_size + value_size;
    END LOOP;
    RETURN true;
END
$$;

