import assert from 'node:assert/strict';
import { randomBytes } from 'node:crypto';
import { test } from 'node:test';
import { CorruptRecordError, encodeResponse, Keyring, MemoryStore, SealedError, SealedStore } from '../dist/esm/index.js';
import { sealResponse } from '../dist/esm/seal.js';
import { vectors } from './vectors.js';

test('sealed forms are the published ones', () => {
  const of = vectors('seal/vectors/sealed.json');
  const keys = Keyring.parse(`# mine\n${of.key_text}\n`);
  const record = Buffer.from(of.record, 'hex');
  assert.equal(of.parts.length, 3);
  for (const { part, token, plaintext, sealed, number, name, response } of of.parts) {
    const more = number === undefined ? Buffer.alloc(0) : Buffer.concat([Buffer.from([0, 0, 0, number]), Buffer.from(name)]);
    const plain = Buffer.from(plaintext, 'hex');
    assert.equal(keys.seal(part, record, BigInt(token), plain, more).toString('hex'), sealed);
    assert.deepEqual(keys.open(Buffer.from(sealed, 'hex'), record, more), { part, token: BigInt(token), plaintext: plain });
    if (response !== undefined) assert.equal(sealResponse(keys, record, BigInt(token), plain).toString('hex'), response);
  }
  const [intent] = of.intents;
  const entry = keys.seal(4, Buffer.alloc(32), 0n, Buffer.from(intent.plaintext, 'hex'), Buffer.from(intent.file));
  assert.equal(entry.toString('hex'), intent.sealed);
  const u32 = (number) => Buffer.of(0, 0, 0, number);
  const lp = (text) => Buffer.concat([u32(text.length), Buffer.from(text)]);
  for (const { consumer, stream, sequence, event, sealed } of of.stream_events) {
    const place = Buffer.concat([lp(consumer), lp(stream), u32(0), u32(Number(sequence))]);
    assert.equal(keys.seal(7, Buffer.alloc(32), 0n, Buffer.from(event, 'hex'), place).toString('hex'), sealed);
  }
  assert.throws(() => Keyring.parse(of.key_text.replace(/1$/, '2')), /line 1 of the seal keys/);
});

test('a sealed store refuses what it cannot open', async () => {
  const memory = new MemoryStore();
  const of = vectors('seal/vectors/sealed.json');
  const store = new SealedStore(memory, Keyring.parse(of.key_text));
  const id = randomBytes(32);
  const claim = () => ({ attempt: randomBytes(16), fingerprint: Buffer.concat([Buffer.of(1), Buffer.alloc(32)]), leaseMs: 1000, retentionMs: 60_000, onAbandoned: 'park', caller: Buffer.alloc(8), keyTag: Buffer.alloc(8), operation: 'POST /' });
  const { token } = await store.claim(id, claim());
  const response = encodeResponse({ status: 200, headers: [], trailers: [], body: Buffer.from('the balance is 17') });
  assert.equal(await store.complete(id, token, 'completed', response, 60_000), 'done');
  assert.deepEqual((await store.claim(id, claim())).response, response);
  assert.ok(!(await memory.lookup(id)).response.includes('balance'));
  const other = randomBytes(32);
  const { token: second } = await memory.claim(other, claim());
  await memory.complete(other, second, 'completed', (await memory.lookup(id)).response, 60_000);
  await assert.rejects(store.claim(other, claim()), CorruptRecordError);
  const clear = randomBytes(32);
  const { token: third } = await memory.claim(clear, claim());
  await memory.complete(clear, third, 'completed', response, 60_000);
  assert.deepEqual((await store.claim(clear, claim())).response, response);
  await assert.rejects(new SealedStore(memory, Keyring.parse(of.key_text), { required: true }).claim(clear, claim()), SealedError);
});
