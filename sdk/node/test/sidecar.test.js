import assert from 'node:assert/strict';
import { test } from 'node:test';
import { completeInTransaction, decodeResponse, sidecarAttempt } from '../dist/esm/index.js';

const record = '17'.repeat(32);
const request = { headers: { 'oncegate-record': record, 'oncegate-token': '3' } };

/** A connection that keeps what it is told. */
function connection() {
  const calls = [];
  return { calls, query: async (...call) => { calls.push(call); return { rows: [] }; } };
}

test('half of the fields of a sidecar is an error, and not a request without a key', async () => {
  const of = (headers) => () => sidecarAttempt({ headers });
  assert.equal(sidecarAttempt({ headers: {} }), undefined);
  assert.equal(sidecarAttempt({ headers: new Headers() }), undefined);
  const once = /^Oncegate-Record and Oncegate-Token must each be there once: does this request come from a sidecar\?$/;
  for (const headers of [{ 'oncegate-record': record }, { 'oncegate-token': '3' }, new Headers({ 'oncegate-record': record }), { 'oncegate-record': [record, record], 'oncegate-token': '3' }, { ...request.headers, 'Oncegate-Token': '4' }]) {
    assert.throws(of(headers), { name: 'TypeError', message: once });
    const client = connection();
    await assert.rejects(completeInTransaction(client, { headers }), { message: once });
    assert.equal(client.calls.length, 0);
  }
  const malformed = /is malformed: does this request come from a sidecar\?$/;
  for (const token of ['', '-1', '1.5', '3, 4', '9223372036854775808', '99999999999999999999']) assert.throws(of({ 'oncegate-record': record, 'oncegate-token': token }), malformed, token);
  assert.throws(of({ ...request.headers, 'oncegate-attempt': 'x' }), malformed);
  assert.throws(of({ ...request.headers, 'oncegate-record': `${record}, ${record}` }), malformed);
  for (const headers of [undefined, null, 5, []]) assert.throws(of(headers), /give a request whose headers/);
});

test('the fields of a sidecar are found in every kind of headers', () => {
  const expected = { record: Buffer.from(record, 'hex'), token: '9223372036854775807', attempt: 2 };
  const fields = { 'Oncegate-Record': record, 'Oncegate-Token': '9223372036854775807', 'Oncegate-Attempt': '2' };
  const ofAnotherLibrary = { get: (name) => new Headers(fields).get(name) };
  for (const headers of [fields, new Headers(fields), ofAnotherLibrary, { 'oncegate-record': [record], 'oncegate-token': fields['Oncegate-Token'], 'oncegate-attempt': '2' }]) {
    assert.deepEqual(sidecarAttempt({ headers }), expected);
  }
  assert.equal(sidecarAttempt(request).attempt, 1);
});

test('a completion that would be committed by itself is not sent', async () => {
  const pool = { ...connection(), totalCount: 1, idleCount: 1 };
  await assert.rejects(completeInTransaction(pool, request), /this is a pool/);
  await assert.rejects(completeInTransaction(pool, { headers: {} }), /this is a pool/);
  assert.equal(pool.calls.length, 0);
  const alone = { ...connection(), getTransactionStatus: () => 'I' };
  await assert.rejects(completeInTransaction(alone, request), /has no open transaction/);
  assert.equal(alone.calls.length, 0);
  const open = { ...connection(), getTransactionStatus: () => 'T' };
  await completeInTransaction(open, request);
  assert.equal(open.calls.length, 1);
  // An older version of `pg`.
  const asked = [];
  const older = { query: async (text) => { asked.push(text); return { rows: [{ alone: true }] }; } };
  await assert.rejects(completeInTransaction(older, request), /has no open transaction/);
  assert.equal(asked.length, 1);
});

test('the response of a completion is stored as it is, or not at all', async () => {
  const complete = async (response) => {
    const client = connection();
    await completeInTransaction(client, request, response).catch((error) => { assert.equal(client.calls.length, 0); throw error; });
    return decodeResponse(client.calls.at(-1)[1][2]);
  };
  const stored = await complete({ status: 201, headers: { 'Content-Disposition': 'filename="\u00e9"', 'Content-Language': ['de', 'en'], 'X-Count': 5 }, body: '\u2603' });
  assert.deepEqual(stored.headers, [['content-disposition', 'filename="\u00e9"'], ['content-language', 'de'], ['content-language', 'en'], ['x-count', '5']]);
  assert.equal(stored.body.toString(), '\u2603');
  const character = /^the header field Content-Disposition of the response has a character that HTTP does not carry; write it in ASCII, such as filename\*=UTF-8''\u2026$/;
  for (const value of ['filename="\u2603\u00e9"', 'a\r\nSet-Cookie: b', 'a\0', 'a\u007f']) await assert.rejects(complete({ status: 201, headers: { 'Content-Disposition': value }, body: '' }), { name: 'TypeError', message: character });
  await assert.rejects(complete({ status: 201, headers: { 'a b': 'c' }, body: '' }), /is not the name of a header field/);
  for (const value of [null, undefined, {}, true]) await assert.rejects(complete({ status: 201, headers: { a: value }, body: '' }), /has a value that is no text/);
  for (const status of [NaN, 201.5, '201', 99]) await assert.rejects(complete({ status, body: '' }), { name: 'RangeError' });
  for (const body of [undefined, {}, 5, [1], new DataView(new ArrayBuffer(2))]) await assert.rejects(complete({ status: 201, body }), /the body of the response is neither a text nor bytes/);
});
