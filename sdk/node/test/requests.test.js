// The golden vectors of requests: which pass, which are refused and how, and which record the others have.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { contract } from '../dist/esm/contract.js';
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
    ({ request, echo } = readWhole(settings, undefined, head, early, body));
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
  assert.throws(() => readSettings({ reqireKey: true }), /there is no setting "reqireKey"/);
  assert.throws(() => readSettings({ fingerprint: { excludes: [] } }), /fingerprint\.excludes/);
  assert.throws(() => readSettings({ lease: '30 seconds' }), /lease: "30 seconds" is not a duration/);
  assert.throws(() => readSettings({ scope: 'x-tenant' }), /scope: "x-tenant" is none of/);
  assert.throws(() => readSettings({ storedHeaders: ['Set-Cookie'] }), /set-cookie must not be stored/);
  assert.throws(() => readSettings({ naturalKey: ['/id'] }), /easy to guess/);
  assert.throws(() => optionsFromNames({ 'rate-limit.caller': '10/s' }), UnknownSettingError);
});
