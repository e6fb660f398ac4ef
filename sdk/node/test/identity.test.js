// The golden vectors of identifiers, fingerprints, responses and derived keys.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { callerDigest, callerTag, derivedKey, downstreamKey, keyTag, recordId } from '../dist/esm/identity.js';
import { fingerprintDigest, partsDigest } from '../dist/esm/fingerprint.js';
import { CorruptRecordError, decodeResponse, encodeResponse } from '../dist/esm/response.js';
import { vectors } from './vectors.js';

test('requests have the published fingerprints', () => {
  const { requests, parts } = vectors('core/vectors/fingerprints.json');
  assert.equal(requests.length, 139);
  for (const of of requests) {
    const { tag, digest } = fingerprintDigest(
      {
        method: of.method,
        ...(of.authority === undefined ? {} : { authority: of.authority }),
        target: of.target,
        contentType: Buffer.from(of.content_type),
        contentCoding: of.content_coding,
        headers: of.headers.map(([name, value]) => [name, Buffer.from(value)]),
        body: of.body_base64 === undefined ? Buffer.from(of.body) : Buffer.from(of.body_base64, 'base64'),
      },
      { rawBodies: of.rules.raw_bodies, include: of.rules.include, exclude: of.rules.exclude },
    );
    assert.deepEqual([tag, digest.toString('hex')], [of.tag, of.digest], of.name);
  }
  for (const of of parts) assert.equal(partsDigest(of.domain, of.parts).toString('hex'), of.digest, of.name);
});

test('records have the published identifiers', () => {
  const { cases } = vectors('core/vectors/record_ids.json');
  assert.equal(cases.length, 21);
  for (const of of cases) {
    const hex = (text) => Buffer.from(text, 'hex');
    const caller = callerDigest(of.caller.map(({ kind, identity_hex }) => ({ kind, identity: hex(identity_hex) })));
    const record = recordId(of.service ?? undefined, caller, of.operation_hex.map(hex), hex(of.key_hex));
    assert.equal(record.toString('hex'), of.record_id, of.name);
    assert.equal(keyTag(hex(of.key_hex)).toString('hex'), of.key_tag, of.name);
    assert.equal(callerTag(caller).toString('hex'), of.caller_tag, of.name);
    for (const [name, key] of Object.entries(of.downstream_keys)) assert.equal(downstreamKey(record, name), key, of.name);
  }
});

test('intents have the published keys', () => {
  const { cases } = vectors('core/vectors/intent_keys.json');
  assert.equal(cases.length, 10);
  for (const of of cases) assert.equal(derivedKey(of.name, of.parts), of.key);
});

test('responses have the published bytes', () => {
  const { cases } = vectors('core/vectors/responses.json');
  assert.equal(cases.length, 4);
  for (const of of cases) {
    const fields = (list) => list.map(([name, value]) => [name, Buffer.from(value, 'hex').toString('latin1')]);
    const response = {
      status: of.status,
      headers: fields(of.headers),
      trailers: fields(of.trailers),
      body: Buffer.from(of.body_hex, 'hex'),
    };
    const encoded = encodeResponse(response);
    assert.equal(encoded.toString('hex'), of.encoded_hex, of.name);
    assert.deepEqual(decodeResponse(encoded), response);
    for (let end = 0; end < encoded.length - response.body.length; end += 1) {
      assert.throws(() => decodeResponse(encoded.subarray(0, end)), CorruptRecordError);
    }
  }
});
