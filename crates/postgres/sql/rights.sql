-- No role has a right here until the owner grants it. docs/reference/store-contract-postgres.md, messages-postgres.md and
-- outbox.md list the grants. Rights of PUBLIC are revoked each time.
REVOKE ALL ON SCHEMA oncegate FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA oncegate FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA oncegate FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncegate FROM PUBLIC;

INSERT INTO oncegate.contract (version) VALUES (current_setting('oncegate.version')::integer) ON CONFLICT DO NOTHING;
