-- Records that are inserted completed, by transactions that claim and complete: one write instead of two.

-- Reserves a record for this transaction, or claims it. If there is no record, and no other transaction is about to insert it,
-- `transaction` is the number of this transaction, and everything else is null: nothing is written, and until the transaction
-- ends every other claim gets in-progress. Complete the record with oncegate.complete_reserved before COMMIT. Otherwise
-- `transaction` is null, and the rest is the result of oncegate.claim.
--
-- The lock comes first, then a look with a younger snapshot: an earlier holder of the lock has committed by then. Above READ
-- COMMITTED the snapshot may be older; then oncegate.complete_reserved fails with SQLSTATE 40001 if there is a record.
CREATE OR REPLACE FUNCTION oncegate.reserve_or_claim(
    id bytea,
    attempt bytea,
    fingerprint bytea,
    lease_ms bigint,
    retention_ms bigint,
    on_abandoned text DEFAULT 'park',
    caller bytea DEFAULT decode('0000000000000000', 'hex'),
    operation text DEFAULT '',
    key_tag bytea DEFAULT NULL,
    OUT transaction bigint,
    OUT outcome text,
    OUT token bigint,
    OUT attempts bigint,
    OUT lease_until bigint,
    OUT after_abandoned boolean,
    OUT lease_left_ms bigint,
    OUT response bytea,
    OUT clock bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(reserve_or_claim.id) = 32) IS NOT TRUE THEN
        PERFORM oncegate.check_size('id', reserve_or_claim.id, 32);
    END IF;
    IF pg_try_advisory_xact_lock(hashtextextended(encode(reserve_or_claim.id, 'hex'), 1868784485)) THEN
        PERFORM FROM oncegate.records AS t WHERE t.id = reserve_or_claim.id;
        IF NOT FOUND THEN
            transaction := txid_current();
        END IF;
    END IF;
    IF transaction IS NULL THEN
        SELECT c.outcome, c.token, c.attempts, c.lease_until, c.after_abandoned, c.lease_left_ms, c.response, c.clock
            INTO outcome, token, attempts, lease_until, after_abandoned, lease_left_ms, response, clock
            FROM oncegate.claim(reserve_or_claim.id, reserve_or_claim.attempt, reserve_or_claim.fingerprint,
                reserve_or_claim.lease_ms, reserve_or_claim.retention_ms, reserve_or_claim.on_abandoned,
                reserve_or_claim.caller, reserve_or_claim.operation, reserve_or_claim.key_tag) AS c;
    END IF;
END
$$;

-- Inserts the completed record that oncegate.reserve_or_claim reserved for the transaction with this number, and returns its
-- token. OG001: there is a record after all, or that transaction was rolled back; roll back as well. Null: that transaction was
-- committed without the record, so this call inserts a record with an unknown outcome, which no claim executes; commit it.
CREATE OR REPLACE FUNCTION oncegate.complete_reserved(
    id bytea,
    transaction bigint,
    fingerprint bytea,
    response bytea,
    retention_ms bigint,
    caller bytea,
    operation text,
    key_tag bytea DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    clock CONSTANT bigint := oncegate.now_ms();
    is_watched boolean;
BEGIN
    -- The server prepares each expression of a function again in every transaction, so the common case is one check and one
    -- statement.
    IF complete_reserved.transaction = txid_current()
        AND octet_length(complete_reserved.id) = 32 AND octet_length(complete_reserved.fingerprint) = 33
        AND oncegate.may_be_response(complete_reserved.response) AND complete_reserved.retention_ms BETWEEN 1 AND 34560000000
        AND octet_length(complete_reserved.caller) = 8 AND octet_length(complete_reserved.operation) <= 256
        AND coalesce(octet_length(complete_reserved.key_tag), 8) = 8
    THEN
        -- The check for a watch is that of oncegate.notify_watchers, as a part of the INSERT.
        INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, caller, key_tag, operation,
                created_at, changed_at, expires_at, purge_at, response)
            VALUES (complete_reserved.id, 'completed', complete_reserved.fingerprint, clock, 1,
                complete_reserved.caller, complete_reserved.key_tag, complete_reserved.operation,
                clock, clock, clock + complete_reserved.retention_ms,
                oncegate.purge_at(0, clock + complete_reserved.retention_ms, clock), complete_reserved.response)
            ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING
            RETURNING NOT (CASE WHEN pg_try_advisory_lock(oncegate.watch_key(t.id))
                THEN pg_advisory_unlock(oncegate.watch_key(t.id)) ELSE false END) INTO is_watched;
        -- Null if there is a record.
        IF NOT is_watched THEN
            RETURN clock;
        ELSIF is_watched THEN
            PERFORM oncegate.notify_watchers(complete_reserved.id);
            RETURN clock;
        END IF;
    ELSE
        PERFORM oncegate.check_size('id', complete_reserved.id, 32), oncegate.check_size('fingerprint', complete_reserved.fingerprint, 33),
            oncegate.check_size('caller', complete_reserved.caller, 8),
            oncegate.check_duration('retention_ms', complete_reserved.retention_ms, 34560000000);
        IF (oncegate.may_be_response(complete_reserved.response) AND octet_length(complete_reserved.operation) <= 256
            AND coalesce(octet_length(complete_reserved.key_tag), 8) = 8 AND complete_reserved.transaction > 0) IS NOT TRUE
        THEN
            RAISE EXCEPTION 'oncegate: %', CASE
                WHEN oncegate.may_be_response(complete_reserved.response) IS NOT TRUE
                    THEN 'response must be given, in the published encoding'
                WHEN (octet_length(complete_reserved.operation) <= 256) IS NOT TRUE THEN 'operation must have at most 256 bytes'
                WHEN octet_length(complete_reserved.key_tag) <> 8 THEN 'key_tag must have 8 bytes or be null'
                ELSE 'transaction must be a number from oncegate.reserve_or_claim'
            END USING ERRCODE = '22023';
        END IF;
        IF complete_reserved.transaction <> txid_current()
            AND txid_status(complete_reserved.transaction) IS DISTINCT FROM 'aborted'
            AND pg_try_advisory_xact_lock(hashtextextended(encode(complete_reserved.id, 'hex'), 1868784485))
        THEN
            INSERT INTO oncegate.records AS t (id, state, fingerprint, token, attempts, caller, key_tag, operation,
                    created_at, changed_at, expires_at, purge_at)
                VALUES (complete_reserved.id, 'unknown', complete_reserved.fingerprint, clock, 1,
                    complete_reserved.caller, complete_reserved.key_tag, complete_reserved.operation,
                    clock, clock, clock + complete_reserved.retention_ms,
                    oncegate.purge_at(0, clock + complete_reserved.retention_ms, clock))
                ON CONFLICT ON CONSTRAINT records_pkey DO NOTHING;
            IF FOUND THEN
                RETURN NULL;
            END IF;
        END IF;
    END IF;
    RAISE EXCEPTION 'oncegate: the transaction may not complete this record, so its effect must not take place'
        USING ERRCODE = 'OG001', HINT = 'Roll back. Another transaction completed the record, or the one that reserved it has ended.';
END
$$;

