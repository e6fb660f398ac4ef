// The golden vectors of requests: which pass, which are refused and how, and which record the others have.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { contract } from '../dist/esm/contract.js';
import { Ids } from '../dist/esm/ids.js';
import { MemoryStore, Oncegate } from '../dist/esm/index.js';
import { refusalResponse, withFields } from '../dist/esm/refusal.js';
import { passes, readHead, readWhole, tooLarge } from '../dist/esm/request.js';
import { optionsFromNames, readSettings, UnknownSettingError } from '../dist/esm/settings.js';
import { vectors } from './vectors.js';

function judge(of) {
  const settings = readSettings(optionsFromNames(of.settings));
  const { method, target, headers: lines } = of.request;
  const head = { method, target, headers: lines.map(([name, value]) => [name, Buffer.from(value).toString('latin1')]) };
  const body = Buffer.from(of.request.body ?? '');
  if (passes(settings, head)) return 'passes';
  const early = readHead(settings, head);
  let { refusal, echo } = early;
  let request;
  if (refusal === undefined && body.length > settings.maxRequestBody) refusal = tooLarge(settings.maxRequestBody);
  if (refusal === undefined) {
    ({ request, echo } = readWhole(settings, { ids: new Ids() }, head, early, body));
    if (request === 'passes') return request;
    refusal = request.refused;
  }
  if (refusal !== undefined) {
    const response = refusalResponse(settings, refusal, undefined);
    const fields = withFields(response.headers, echo === undefined ? [] : [echo]).sort((one, other) =>
      JSON.stringify(one) < JSON.stringify(other) ? -1 : 1,
    );
    return { refused: { status: response.status, headers: fields, body: response.body.toString() } };
  }
  return {
    record: request.id.toString('hex'),
    fingerprint: request.fingerprint.toString('hex'),
    caller: request.callerTag.toString('hex'),
    key_tag: request.keyTag.toString('hex'),
    operation: request.operation,
  };
}

test('requests have the published records and refusals', () => {
  const { cases } = vectors('http/vectors/requests.json');
  assert.equal(cases.length, 438);
  for (const of of cases) {
    const { expect } = of;
    assert.deepEqual(judge(of), expect, of.name);
  }
});

test('conditions are those of the shared data', () => {
  const { cases } = vectors('http/vectors/conditions.json');
  assert.equal(cases.length, 30);
  assert.deepEqual(contract.conditions, cases);
});

test('a setting that is mistyped is named', () => {
  assert.throws(() => readSettings({ reqireKey: true }), /there is no setting "reqireKey"; did you mean "requireKey"\?/);
  assert.throws(() => readSettings({ zzz: 1 }), /there is no setting "zzz"; the settings are profile, scope/);
  assert.throws(() => readSettings({ fingerprint: { exclud: [] } }), /"fingerprint\.exclud"; did you mean "exclude"\?/);
  assert.throws(() => readSettings({ profile: 'strip' }), /profile: "strip" is none of .*; did you mean "stripe"\?/);
  assert.throws(() => readSettings({ fingerprint: { excludes: [] } }), /fingerprint\.excludes/);
  assert.throws(() => readSettings({ lease: '30 seconds' }), /lease: "30 seconds" is not a duration/);
  assert.throws(() => readSettings({ scope: 'x-tenant' }), /scope: "x-tenant" is none of/);
  assert.throws(() => readSettings({ storedHeaders: ['Set-Cookie'] }), /set-cookie must not be stored/);
  assert.throws(() => readSettings({ naturalKey: ['/id'] }), /easy to guess/);
  assert.throws(() => optionsFromNames({ 'rate-limit.caller': '10/s' }), UnknownSettingError);
});

test('no value switches protection off without a word', () => {
  for (const [options, message] of [
    [{ methods: 'POST,PATCH' }, 'methods: "POST,PATCH" is not a method; write a list: ["POST","PATCH"]'],
    [{ methods: ['POST PATCH'] }, 'methods: "POST PATCH" is not a method; write a list: ["POST","PATCH"]'],
    [{ methods: [] }, 'methods: the list is empty, so nothing would be protected'],
    [{ methods: ['GET'] }, 'methods: GET has no effect that a key could protect'],
    [{ methods: ['POST', 'put'] }, 'methods: "put" is not a method; did you mean "PUT"?'],
    [{ methods: [7] }, 'methods: write a text, or a list of texts'],
    [{ keyHeader: [] }, 'keyHeader: the list is empty, so no request would have a key'],
    [{ keyHeader: 'Idempotency-Key, X-Key' }, 'keyHeader: "Idempotency-Key, X-Key" is not the name of a header field; write a list: ["Idempotency-Key","X-Key"]'],
    [{ keyHeader: ['X-Key', 'x-key'] }, 'keyHeader: the header field x-key is there twice'],
    [{ keyHeader: 'Authorization' }, 'keyHeader: the header field authorization has another purpose, and many requests have the same value there; name a field that carries only keys'],
    [{ keyHeader: 'Content-MD5' }, 'keyHeader: the header field content-md5 has another purpose, and many requests have the same value there; name a field that carries only keys'],
    [{ naturalKey: [], scope: 'single-tenant' }, 'naturalKey: the list is empty, so no request would have a key'],
    // One caller for all of them: each would get the responses of the others.
    [{ scope: [] }, 'scope: the list is empty; write "single-tenant" if there is only one caller'],
    [{ scope: ['header:x-tenant', 'required-header:X-Tenant'] }, 'scope: "required-header:X-Tenant" was given twice'],
    [{ requireKey: 'false' }, 'requireKey: "false" is neither true nor false'],
    [{ releaseStatuses: 'x' }, 'releaseStatuses: "x" is not a status that can free the key; write one from 400 to 599 such as 422, "4xx" or "5xx"'],
    [{ releaseStatuses: 200 }, 'releaseStatuses: 200 is not a status that can free the key; write one from 400 to 599 such as 422, "4xx" or "5xx"'],
    [{ releaseStatuses: [404, 303] }, 'releaseStatuses: 303 is not a status that can free the key; write one from 400 to 599 such as 422, "4xx" or "5xx"'],
    [{ replayMarker: 'content-type' }, 'replayMarker: "content-type" is not one field without another purpose; write one such as "Idempotent-Replayed"'],
    [{ replayMarker: 'set-cookie' }, 'replayMarker: "set-cookie" is not one field without another purpose; write one such as "Idempotent-Replayed"'],
    [{ fingerprint: 'raw' }, 'fingerprint: "raw" is not an object such as { exclude: ["/sent_at"] }'],
    [{ keyFormat: 5 }, 'keyFormat: 5 is not a text'],
    ['POST', 'the options are an object, not "POST"'],
    [null, 'the options are an object, not null'],
  ]) {
    assert.throws(() => readSettings(options), { name: 'SettingsError', message });
  }
  assert.throws(() => readSettings({ scope: 'singel-tenant' }), /; did you mean "single-tenant"\?$/);
  assert.throws(() => readSettings({ scope: 'heder:x-user' }), /; did you mean "header"\?$/);
  // Names of cookies are case-sensitive.
  assert.equal(readSettings({ scope: ['cookie:sid', 'cookie:SID', 'header:x-tenant'] }).scope.parts.length, 3);
  const releases = (releaseStatuses) => [404, 422, 500].map(readSettings({ releaseStatuses }).releases);
  assert.deepEqual([releases('404'), releases(404), releases('4xx')], [[true, false, false], [true, false, false], [true, true, false]]);
  // It may be a method that this library does not know.
  const warnings = [];
  const oncegate = new Oncegate({ store: new MemoryStore(), warn: (message) => warnings.push(message) });
  oncegate.gate({ methods: ['PSOT', 'ENROL', 'PATCH'] });
  assert.deepEqual(warnings, ['methods: no registered method is called "PSOT"; did you mean "POST"?', 'methods: no registered method is called "ENROL"']);
});
