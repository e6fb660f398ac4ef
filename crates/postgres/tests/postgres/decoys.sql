-- Creates decoys in `public` for each function and operator of the server whose name occurs in the text of decoys.contract:
-- one that takes exactly the types that the server would have to convert, and one with the server's own argument types.
-- A call of any of them raises an error.
CREATE SCHEMA decoys;
CREATE TABLE decoys.contract (sql text);

-- The types from which the server converts an argument of this type.
CREATE FUNCTION decoys.given_as(argument oid) RETURNS SETOF oid LANGUAGE sql STABLE SET search_path = pg_catalog AS $$
    SELECT argument WHERE argument NOT IN (SELECT t.oid FROM pg_type AS t WHERE t.typtype = 'p')
    UNION
    SELECT c.castsource FROM pg_cast AS c JOIN pg_type AS t ON t.oid = c.castsource
    WHERE c.casttarget = argument AND c.castcontext = 'i' AND t.typtype = 'b' AND c.castsource <> argument
        AND c.castsource::regtype::text IN ('smallint', 'integer', 'bigint', 'numeric', 'real', 'text', 'name', 'oid', 'regclass',
            'character varying', '"char"', 'regproc', 'regrole', 'regnamespace')
    UNION
    SELECT a FROM unnest(CASE
        WHEN argument IN ('anyarray'::regtype, 'anycompatiblearray'::regtype)
            THEN ARRAY['text[]', 'bytea[]', 'bigint[]']::regtype[]
        WHEN argument IN ('anyelement'::regtype, 'anynonarray'::regtype, 'anycompatible'::regtype, 'anycompatiblenonarray'::regtype)
            THEN ARRAY['text', 'bytea', 'bigint', 'integer', 'name', '"char"']::regtype[]
    END::oid[]) AS a
$$;

CREATE FUNCTION decoys.lists(arguments oid[]) RETURNS SETOF oid[] LANGUAGE sql STABLE SET search_path = pg_catalog AS $$
    WITH RECURSIVE lists AS (
        SELECT '{}'::oid[] AS list
        UNION ALL
        SELECT l.list || g FROM lists AS l, decoys.given_as(arguments[cardinality(l.list) + 1]) AS g
        WHERE cardinality(l.list) < cardinality(arguments)
    )
    SELECT list FROM lists WHERE cardinality(list) = cardinality(arguments)
$$;

CREATE FUNCTION decoys.plant() RETURNS integer LANGUAGE plpgsql SET search_path = pg_catalog AS $plant$
DECLARE
    -- As words, and not within others.
    words CONSTANT text[] := (SELECT array_agg(DISTINCT w[1]) FROM decoys.contract, regexp_matches(sql, '([a-z_0-9]+)\(', 'g') AS w);
    signs CONSTANT text[] := (SELECT array_agg(DISTINCT w[1]) FROM decoys.contract,
        regexp_matches(sql, '[a-z0-9)'']\s+([-+*/<>=~!@#%^&|]+)\s', 'g') AS w);
    body CONSTANT text := 'AS $$ BEGIN RAISE EXCEPTION ''a decoy was called'' USING ERRCODE = ''OG666''; END $$';
    planted integer := 0;
    f record;
    list oid[];
BEGIN
    FOR f IN
        SELECT p.proname, p.proargtypes::oid[] AS arguments, p.proretset, CASE
                WHEN t.typtype = 'p' AND p.prorettype <> 'void'::regtype THEN 'text'::regtype ELSE p.prorettype::regtype
            END AS result
        FROM pg_proc AS p JOIN pg_type AS t ON t.oid = p.prorettype
        WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname = ANY (words) AND p.prokind IN ('f', 'a')
            AND p.provariadic = 0
    LOOP
        FOR list IN SELECT decoys.lists((SELECT array_agg(a ORDER BY n) FROM unnest(f.arguments) WITH ORDINALITY AS u (a, n))) LOOP
            CONTINUE WHEN list IS NULL;
            BEGIN
                EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s %s LANGUAGE plpgsql %s', f.proname,
                    (SELECT string_agg(a::regtype::text, ', ' ORDER BY n) FROM unnest(list) WITH ORDINALITY AS u (a, n)),
                    CASE WHEN f.proretset THEN 'SETOF' ELSE '' END, f.result, body);
                planted := planted + 1;
            EXCEPTION WHEN duplicate_function OR invalid_function_definition OR feature_not_supported THEN
                NULL;
            END;
        END LOOP;
        IF cardinality(f.arguments) = 0 THEN
            BEGIN
                EXECUTE format('CREATE FUNCTION public.%I() RETURNS %s %s LANGUAGE plpgsql %s', f.proname,
                    CASE WHEN f.proretset THEN 'SETOF' ELSE '' END, f.result, body);
                planted := planted + 1;
            EXCEPTION WHEN duplicate_function THEN
                NULL;
            END;
        END IF;
    END LOOP;
    FOR f IN
        SELECT o.oprname, o.oprleft, o.oprright, CASE
                WHEN t.typtype = 'p' THEN 'text'::regtype ELSE o.oprresult::regtype
            END AS result
        FROM pg_operator AS o JOIN pg_type AS t ON t.oid = o.oprresult
        WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprname = ANY (signs)
    LOOP
        FOR list IN SELECT decoys.lists(CASE WHEN f.oprleft = 0 THEN ARRAY[f.oprright] ELSE ARRAY[f.oprleft, f.oprright] END) LOOP
            BEGIN
                EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql %s', 'decoy_' || planted,
                    (SELECT string_agg(a::regtype::text, ', ' ORDER BY n) FROM unnest(list) WITH ORDINALITY AS u (a, n)),
                    f.result, body);
                EXECUTE format('CREATE OPERATOR public.%s (%s RIGHTARG = %s, FUNCTION = public.%I)', f.oprname,
                    CASE WHEN f.oprleft = 0 THEN '' ELSE format('LEFTARG = %s,', list[1]::regtype) END,
                    list[cardinality(list)]::regtype, 'decoy_' || planted);
                planted := planted + 1;
            EXCEPTION WHEN duplicate_function THEN
                NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN planted;
END
$plant$;
