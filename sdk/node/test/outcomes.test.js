// The golden vectors of outcomes: what becomes of the response of a handler, and of its retry.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { MemoryStore, Oncegate, optionsFromNames } from '../dist/esm/index.js';
import { vectors } from './vectors.js';

/** Notes how attempts end. */
class NotingStore extends MemoryStore {
  ends = [];

  complete(id, token, state, response, retentionMs) {
    this.ends.push(state === 'completed' ? { completed: response.toString('hex') } : state);
    return super.complete(id, token, state, response, retentionMs);
  }

  release(id, token, retentionMs) {
    this.ends.push('released');
    return super.release(id, token, retentionMs);
  }
}

async function outcome(of) {
  const store = new NotingStore();
  const gate = new Oncegate({ store }).gate(optionsFromNames({ ...of.settings, wait: 0 }));
  let executions = 0;
  const send = async () => {
    const head = { method: 'POST', target: '/pay', headers: [['idempotency-key', 'k'], ['host', 'shop.test']] };
    const admission = await gate.admit(head, async () => Buffer.alloc(0));
    let wire = admission.response;
    let body = wire?.body;
    if (admission.kind === 'execute') {
      executions += 1;
      const { execution } = admission;
      body = Buffer.from(of.response.body);
      const response = { status: of.response.status, headers: of.response.headers };
      const isWhole = body.length <= execution.maxResponseBody && !execution.isEndless(response);
      wire = await execution.finish(response, isWhole ? body : undefined);
    }
    const headers = [...wire.headers].sort((one, other) => (JSON.stringify(one) < JSON.stringify(other) ? -1 : 1));
    return { status: wire.status, headers, body: body.toString() };
  };
  const [first, retry] = [await send(), await send()];
  return { first, record: store.ends[0], executions, retry };
}

test('responses have the published outcomes', async () => {
  const { cases } = vectors('http/vectors/outcomes.json');
  assert.equal(cases.length, 128);
  for (const of of cases) assert.deepEqual(await outcome(of), of.expect, of.name);
});
