// The store in memory decides as `decide()` of the Rust code does.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { decide } from '../dist/esm/decide.js';
import { vectors } from './vectors.js';

const bytes = (hex) => (hex === null || hex === undefined ? undefined : Buffer.from(hex, 'hex'));

function command(of) {
  const common = { command: of.command, token: of.token, leaseMs: of.lease_ms, retentionMs: of.retention_ms };
  switch (of.command) {
    case 'claim':
      return {
        ...common,
        attempt: of.attempt,
        fingerprint: of.fingerprint,
        onAbandoned: of.on_abandoned,
        caller: of.caller,
        keyTag: of.key_tag ?? undefined,
        operation: of.operation,
      };
    case 'step':
      return { ...common, number: of.number, name: of.name, result: bytes(of.result) };
    case 'complete':
      return { ...common, state: of.state, response: bytes(of.response) };
    case 'resolve':
      return { ...common, resolution: of.resolution, response: bytes(of.response), force: of.force, amend: of.amend };
    default:
      return common;
  }
}

function shownRecord(record) {
  if (record === undefined) return null;
  const shown = {
    attempts: record.attempts,
    by_operator: record.byOperator,
    caller: record.caller,
    changed_at: record.changedAt,
    created_at: record.createdAt,
    expires_at: record.expiresAt,
    fingerprint: record.fingerprint,
    key_tag: record.keyTag ?? null,
    operation: record.operation,
    state: record.state,
    steps: record.steps.map(([name, result]) => [name, result.toString('hex')]),
    token: record.token,
  };
  if (record.state === 'in-progress') {
    Object.assign(shown, { after_abandoned: record.afterAbandoned, attempt: record.attempt, lease_until: record.leaseUntil });
  }
  if (record.state === 'completed') shown.response = record.response.toString('hex');
  return shown;
}

function shownOutcome(outcome) {
  const names = { leaseUntil: 'lease_until', afterAbandoned: 'after_abandoned', leaseLeftMs: 'lease_left_ms', stateBefore: 'state_before' };
  return Object.fromEntries(
    Object.entries(outcome).map(([name, value]) => [
      names[name] ?? name,
      value === undefined ? null : Buffer.isBuffer(value) ? value.toString('hex') : value,
    ]),
  );
}

test('every published decision', () => {
  const { walks } = vectors('core/vectors/decisions.json');
  let steps = 0;
  for (const walk of walks) {
    let record;
    for (const of of walk) {
      steps += 1;
      const { outcome, write } = decide(record, command(of), of.now);
      record = write ?? record;
      assert.deepEqual(shownOutcome(outcome), of.expect, JSON.stringify(of));
      // A record past its retention may stay.
      if (of.record !== null || (record !== undefined && record.expiresAt > of.now)) {
        assert.deepEqual(shownRecord(record), of.record, JSON.stringify(of));
      }
    }
  }
  assert.equal(walks.length, 40);
  assert.equal(steps, 960);
});
