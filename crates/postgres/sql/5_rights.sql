-- Nobody may do anything here who was not told so. See docs/reference/store-contract-postgres.md, messages-postgres.md and outbox.md
-- for the grants. What was granted to PUBLIC is taken back, each time.
REVOKE ALL ON SCHEMA oncegate FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA oncegate FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA oncegate FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncegate FROM PUBLIC;

-- Rights at an upgrade, once. No role gets one that lets it do what it could not do before.
DO $$
DECLARE
    before CONSTANT integer := (SELECT max(c.version) FROM oncegate.contract AS c);
    g record;
BEGIN
    -- Of version 1: who may complete an attempt may note its steps, who may look up a record may read its steps, and who may claim
    -- a record and complete it may do both at once.
    IF before = 1 THEN
        FOR g IN
            SELECT n.name, a.grantee::regrole AS role
            FROM (VALUES ('complete_if_owner', 'complete_if_owner', 'step'), ('lookup', 'lookup', 'steps'),
                    ('lookup', 'lookup', 'lookup_with_steps'), ('claim', 'claim', 'reserve_or_claim'),
                    ('complete', 'claim', 'reserve'), ('complete', 'claim', 'complete_reserved'))
                    AS n (like_that_of, and_of, name)
                JOIN pg_proc AS p ON p.pronamespace = 'oncegate'::regnamespace AND p.proname = n.like_that_of
                JOIN pg_proc AS q ON q.pronamespace = 'oncegate'::regnamespace AND q.proname = n.and_of,
                aclexplode(p.proacl) AS a
            WHERE a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0::oid, p.proowner)
                AND has_function_privilege(a.grantee, q.oid, 'EXECUTE')
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION oncegate.%I TO %s', g.name, g.role);
        END LOOP;
    END IF;
    -- With the marks of records came two functions that read them. Who may read a record with its steps may read it with its
    -- marks, and who may list records and read their steps may list them with both.
    IF current_setting('oncegate.adds_marks', true) = 'on' THEN
        FOR g IN
            SELECT n.name, a.grantee::regrole AS role
            FROM (VALUES ('lookup_with_steps', 'lookup_with_steps', 'lookup_record'), ('list', 'steps', 'list_records'))
                    AS n (like_that_of, and_of, name)
                JOIN pg_proc AS p ON p.pronamespace = 'oncegate'::regnamespace AND p.proname = n.like_that_of
                JOIN pg_proc AS q ON q.pronamespace = 'oncegate'::regnamespace AND q.proname = n.and_of,
                aclexplode(p.proacl) AS a
            WHERE a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0::oid, p.proowner)
                AND has_function_privilege(a.grantee, q.oid, 'EXECUTE')
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION oncegate.%I TO %s', g.name, g.role);
        END LOOP;
    END IF;
    -- Upgrades from version 1 to versions 2 to 4 let everybody who might complete an attempt of a sidecar insert a completed record
    -- for any key. Who may not claim loses that.
    IF before BETWEEN 2 AND 4 THEN
        FOR g IN
            SELECT p.proname AS name, a.grantee::regrole AS role
            FROM pg_proc AS p, aclexplode(p.proacl) AS a
            WHERE p.pronamespace = 'oncegate'::regnamespace AND p.proname IN ('reserve', 'complete_reserved')
                AND a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0::oid, p.proowner)
                AND NOT EXISTS (SELECT FROM pg_proc AS q WHERE q.pronamespace = 'oncegate'::regnamespace
                    AND q.proname IN ('claim', 'reserve_or_claim') AND has_function_privilege(a.grantee, q.oid, 'EXECUTE'))
        LOOP
            EXECUTE format('REVOKE EXECUTE ON FUNCTION oncegate.%I FROM %s CASCADE', g.name, g.role);
        END LOOP;
    END IF;
END
$$;

INSERT INTO oncegate.contract (version) SELECT v FROM generate_series(1, 6) AS v ON CONFLICT DO NOTHING;
