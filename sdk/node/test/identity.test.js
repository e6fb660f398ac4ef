// The golden vectors of identifiers, fingerprints, responses and derived keys.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { inspect } from 'node:util';
import { digestOf } from '../dist/esm/bytes.js';
import { callerDigest, derivedKey, downstreamKey, recordId } from '../dist/esm/identity.js';
import { Ids, IdSecret, MARK } from '../dist/esm/ids.js';
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
    const ids = new Ids();
    assert.ok(ids.record(record).equals(record) && ids.fingerprint(record).equals(record));
    assert.equal(ids.keyTag(hex(of.key_hex)).toString('hex'), of.key_tag, of.name);
    assert.equal(ids.callerTag(caller).toString('hex'), of.caller_tag, of.name);
    for (const [name, key] of Object.entries(of.downstream_keys)) assert.equal(downstreamKey(record, name), key, of.name);
  }
});

test('an id secret keys all identifiers', () => {
  const plain = new Map(vectors('core/vectors/record_ids.json').cases.map((of) => [of.name, of]));
  const hex = (text) => Buffer.from(text, 'hex');
  const { secrets } = vectors('core/vectors/keyed_ids.json');
  assert.equal(secrets.length, 2);
  for (const { name, text, mark, cases } of secrets) {
    const ids = Ids.of(text);
    assert.equal(ids.secret.name, name);
    assert.deepEqual([MARK.toString('hex'), ids.secret.markFingerprint().toString('hex')], [mark.record_id, `01${mark.fingerprint}`]);
    assert.equal(cases.length, 21);
    for (const of of cases) {
      const { record_id, key_hex, caller: parts } = plain.get(of.name);
      const caller = callerDigest(parts.map(({ kind, identity_hex }) => ({ kind, identity: hex(identity_hex) })));
      assert.equal(ids.record(hex(record_id)).toString('hex'), of.record_id, of.name);
      assert.equal(ids.callerTag(caller).toString('hex'), of.caller_tag, of.name);
      assert.equal(ids.keyTag(hex(key_hex)).toString('hex'), of.key_tag, of.name);
      assert.equal(ids.fingerprint(hex(`01${of.fingerprint_digest_hex}`)).toString('hex'), `01${of.fingerprint}`, of.name);
    }
  }
});

test('an id secret is read from its text, and shows nothing but its name', () => {
  const [{ text, name, secret_hex: digits }] = vectors('core/vectors/keyed_ids.json').secrets;
  const secret = IdSecret.parse(`# the secret of the shop\n${text}\n`);
  for (const shown of [inspect(secret), inspect({ deep: [new Ids(secret)] }, { depth: 9, showHidden: true }), String(secret), JSON.stringify({ secret }), `${Object.entries(secret)}`]) {
    assert.ok(shown.includes(name) && !shown.includes(digits.slice(8, 16)), shown);
  }
  for (let at = 0; at < text.length; at += 1) {
    const slip = text.slice(0, at) + (text[at] === '0' ? '1' : '0') + text.slice(at + 1);
    for (const wrong of [slip, text.slice(0, at)]) assert.throws(() => IdSecret.parse(wrong), (error) => /^idSecret: /.test(error.message) && !error.message.includes(digits.slice(8, 16)));
  }
  assert.throws(() => IdSecret.parse(`${text}\n${text}`), /more than one line/);
  assert.throws(() => IdSecret.parse(text.toUpperCase()), /has the form/);
  for (const wrong of [null, 5, Buffer.from(text), { text }]) assert.throws(() => Ids.of(wrong), (error) => /idSecret: give the text/.test(error.message) && !error.message.includes(digits.slice(8, 16)));
});

test('intents have the published keys', () => {
  const { cases } = vectors('core/vectors/intent_keys.json');
  assert.equal(cases.length, 10);
  for (const of of cases) assert.equal(derivedKey(of.name, of.parts), of.key);
});

test('a derived key takes texts and whole numbers, and names the part that is neither', () => {
  assert.equal(derivedKey('payment', [7, -1, 2 ** 53 - 1]), derivedKey('payment', ['7', '-1', '9007199254740991']));
  for (const [part, found] of [
    [7n, 'of type bigint'], [1.5, 'the number 1.5'], [NaN, 'the number NaN'], [2 ** 53, 'the number 9007199254740992'], [true, 'of type boolean'],
    [undefined, 'of type undefined'], [null, 'null'], [new Date(0), 'of type object'], [Symbol('x'), 'of type symbol'], [Buffer.from('x'), 'of type object'], [['x'], 'of type object'],
  ]) assert.throws(() => derivedKey('payment', ['order-7', part]), (error) => error instanceof TypeError && error.message.startsWith(`derivedKey: part 1 is ${found}: give a text`), found);
  assert.throws(() => derivedKey('payment', ['\ud800']), /part 0 has half of a surrogate pair/);
  assert.throws(() => derivedKey(7n, []), /^TypeError: derivedKey: the name is of type bigint/);
  assert.throws(() => derivedKey('payment', 'order-7'), /the parts are an array/);
  assert.equal(downstreamKey(Buffer.alloc(32), 7), downstreamKey(Buffer.alloc(32), '7'));
  for (const wrong of [7n, 1.5, true, undefined, {}]) assert.throws(() => downstreamKey(Buffer.alloc(32), wrong), /^TypeError: downstreamKey: the name is /);
  // Whatever else is hashed is never left out.
  for (const wrong of [7n, true, {}]) assert.throws(() => digestOf(['a', wrong]), TypeError);
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
