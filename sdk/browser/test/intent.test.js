import assert from 'node:assert/strict';
import { test } from 'node:test';
import { load, serve, storage } from './pages.js';

const text = (req) => new Promise((done) => { let all = ''; req.on('data', (part) => { all += part; }).on('end', () => done(all)); });
const shown = ({ kind, verdict, advice, reason, mayHaveTakenEffect }) => (kind === 'open' ? [reason, mayHaveTakenEffect] : [verdict, advice]);

test('one key for all attempts, through cut connections, 503, 409 and a cut body', async () => {
  const { intent } = await load();
  const seen = [];
  const there = await serve(async (req, res) => {
    seen.push([req.method, req.headers['idempotency-key'], req.headers['content-type'], await text(req)]);
    if (seen.length === 1) { req.socket.destroy(); return; }
    if (seen.length === 2) { res.writeHead(503).end(); return; }
    if (seen.length === 3) { res.writeHead(409).end(); return; }
    if (seen.length === 4) { res.writeHead(201, { 'content-length': 10 }); res.write('cut'); setImmediate(() => res.destroy()); return; }
    res.writeHead(201, { 'Idempotent-Replayed': 'true' }).end('{"id":1}');
  });
  const place = storage();
  const outcome = await intent('buy', there.url, { amount: 5 }, { storage: place }).send();
  assert.deepEqual([outcome.kind, outcome.verdict, outcome.attempts, outcome.isReplayed, await outcome.response.json()], ['definite', 'done', 5, true, { id: 1 }]);
  assert.equal(new Set(seen.map(String)).size, 1);
  assert.deepEqual(seen[0], ['POST', outcome.key, 'application/json', '{"amount":5}']);
  assert.match(outcome.key, /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  there.close();
});

test('what is not definite says if it may have taken effect', async () => {
  const { intent, stateOf, forget } = await load();
  const problem = '{"type":"urn:oncegate:problem:outcome-unknown","retry":"stop"}';
  const there = await serve((req, res) => {
    const [status, headers = {}, body = ''] = {
      '/busy': [503, { 'retry-after': '600' }], '/late': [429, { 'retry-after': '600' }], '/no': [422], '/away': [404], '/moved': [302, { location: '/' }],
      '/unknown': [500, { 'content-type': 'application/json' }, problem], '/hang': [],
    }[req.url];
    if (status !== undefined) res.writeHead(status, headers).end(body);
  });
  const options = { storage: storage(), attemptTimeout: 500, maxAttempts: 2 };
  const send = async (path, signal) => { const outcome = await intent(path, there.url.slice(0, -1) + path, 1, options).send(signal); return [...shown(outcome), stateOf(outcome)]; };
  assert.deepEqual(await send('/busy'), ['come-back-later', true, 'unknown']);
  assert.deepEqual(await send('/late'), ['come-back-later', false, 'not-done']);
  assert.deepEqual(await send('/no'), ['refused', 'fix-request', 'refused']);
  assert.deepEqual(await send('/away'), ['turned-away', undefined, 'refused']);
  assert.deepEqual(await send('/unknown'), ['unknown', true, 'unknown']);
  // Node shows the status of a redirection, and browsers do not: to them it is 0.
  assert.deepEqual(await send('/moved'), ['unknown', true, 'unknown']);
  forget('/moved', options);
  options.fetch = async () => ({ status: 0, headers: new Headers(), clone: () => new Response() });
  assert.deepEqual(await send('/moved'), ['unknown', true, 'unknown']);
  delete options.fetch;
  assert.deepEqual(await send('/hang'), ['attempts', true, 'unknown']);
  forget('/hang', options);
  const controller = new AbortController();
  setTimeout(() => controller.abort(), 50);
  assert.deepEqual(await send('/hang', controller.signal), ['aborted', true, 'unknown']);
  assert.deepEqual(await send('/late', AbortSignal.abort()), ['aborted', false, 'not-done']);
  assert.throws(() => intent('bad', 'http://[', 1, options).send(), TypeError);
  assert.equal(options.storage.kept.get('oncegate:bad'), undefined);
  there.close();
});

test('a reload keeps the key and the doubt until the outcome is definite', async () => {
  const keys = [];
  let answer = () => undefined;
  const there = await serve((req, res) => { keys.push(req.headers['idempotency-key']); answer(res); });
  const options = { storage: storage(), maxAttempts: 1 };
  const page = async (content = { amount: 5 }, more = {}) => {
    const library = await load();
    return { ...library, left: library.isUnsettled('buy', options), intent: library.intent('buy', there.url, content, { ...options, ...more }) };
  };
  const first = await page();
  assert.equal(first.left, false);
  void first.intent.send();
  while (keys.length === 0) await new Promise((done) => { setTimeout(done, 5); });
  // The page is loaded again in the middle.
  const second = await page();
  assert.deepEqual([second.left, second.intent.key], [true, keys[0]]);
  // A refusal does not say what became of the first attempt.
  answer = (res) => res.writeHead(402).end();
  assert.deepEqual(shown(await second.intent.send()), ['turned-away', true]);
  // Another amount is another purchase, which waits until this one is settled.
  const other = await page({ amount: 6 });
  const blocked = await other.intent.send();
  assert.deepEqual([...shown(blocked), other.stateOf(blocked), blocked.key, blocked.attempts], ['earlier-intent', true, 'unknown', keys[0], 0]);
  assert.notEqual(other.intent.key, keys[0]);
  answer = (res) => res.writeHead(201, { 'idempotent-replayed': 'true' }).end('{}');
  const done = await (await page()).intent.send();
  assert.deepEqual([...shown(done), done.isReplayed], ['done', undefined, true]);
  assert.deepEqual(new Set(keys), new Set([keys[0]]));
  // It is settled, so another one may begin.
  answer = (res) => res.writeHead(201).end('{}');
  const next = await (await page({ amount: 6 })).intent.send();
  assert.equal(shown(next)[0], 'done');
  assert.notEqual(next.key, keys[0]);
  there.close();
});

test('a refusal ends the intent, and what was turned away keeps its key', async () => {
  const keys = [];
  let status = 402;
  const there = await serve((req, res) => { keys.push(req.headers['idempotency-key']); res.writeHead(status).end(); });
  const { intent, isUnsettled } = await load();
  const options = { storage: storage() };
  const buy = intent('buy', there.url, 1, options);
  await buy.send();
  assert.equal(options.storage.kept.size, 0);
  status = 401;
  await buy.send();
  assert.equal(isUnsettled('buy', options), false);
  status = 201;
  await buy.send();
  assert.deepEqual([keys.length, keys[0] === keys[1], keys[1] === keys[2]], [3, false, true]);
  there.close();
});

test('after it was done, the same place of the history is the same purchase', async () => {
  const keys = [];
  const there = await serve((req, res) => { keys.push(req.headers['idempotency-key']); res.writeHead(201).end(); });
  const options = { storage: storage() };
  const buy = async (content = 1) => (await load()).intent('buy', there.url, content, options).send();
  // A browser that does not tell the place: only other content, or forgetting, makes it another purchase.
  await buy();
  await buy();
  (await load()).forget('buy', options);
  globalThis.navigation = { currentEntry: { key: 'checkout' } };
  try {
    await buy();
    await buy();
    globalThis.navigation.currentEntry.key = 'checkout again';
    await buy();
    globalThis.navigation.currentEntry.key = 'checkout';
    await buy(2);
    await buy(2);
    (await load()).forget('buy', options);
    await buy(2);
  } finally {
    delete globalThis.navigation;
  }
  const numbers = keys.map((key) => [...new Set(keys)].indexOf(key));
  assert.deepEqual(numbers, [0, 0, 1, 1, 2, 3, 3, 4]);
  there.close();
});

test('calls while it is being sent join', async () => {
  const { intent, sendingOf } = await load();
  const waiting = [];
  const there = await serve((req, res) => waiting.push(res));
  const options = { storage: storage() };
  const first = intent('buy', there.url, { amount: 5 }, options).send();
  const second = intent('buy', there.url, { amount: 5 }, options).send();
  assert.equal(first, second);
  assert.equal(sendingOf('buy'), first);
  const other = await intent('buy', there.url, { amount: 6 }, options).send();
  assert.deepEqual(shown(other), ['earlier-intent', true]);
  while (waiting.length === 0) await new Promise((done) => { setTimeout(done, 5); });
  waiting[0].writeHead(201).end();
  assert.equal((await first).verdict, 'done');
  assert.deepEqual([waiting.length, sendingOf('buy')], [1, undefined]);
  there.close();
});

test('contents are told apart: addresses, methods, forms, files, keys', async () => {
  const { intent } = await load();
  const form = (...entries) => { const made = new FormData(); entries.forEach((entry) => made.append(...entry)); return made; };
  const file = (content, lastModified) => new File([content], 'a.txt', { lastModified });
  const place = storage();
  const post = (content, more) => ['http://localhost/', content, more];
  const made = [
    post(1), post('1'), post({ a: 1 }), post({ a: 2 }), post({ a: [1] }), ['http://localhost/b', 1], post(1, { init: { method: 'PUT' } }), post(1, { key: 'cart-1' }),
    post(new URLSearchParams('a=1')), post(new URLSearchParams('a=2')), post(form(['a', '1'], ['a', '2'])), post(form(['a', '2'], ['a', '1'])),
    post(form(['f', file('x', 1)])), post(form(['f', file('xy', 1)])), post(form(['f', file('x', 2)])),
  ];
  // Each one is in doubt at the time when the next one is asked.
  for (const [at, [url, content, more]] of made.entries()) {
    place.kept.clear();
    const fetch = () => Promise.reject(new Error('away'));
    const { key } = await intent('one', url, content, { ...more, storage: place, fetch, maxAttempts: 1 }).send();
    made.forEach(([otherUrl, other, others], index) => {
      assert.equal(intent('one', otherUrl, other, { ...others, storage: place }).key === key, index === at, `${at}, ${index}`);
    });
  }
});

test('a key of the service, and one that is too old', async () => {
  const { intent } = await load();
  const keys = [];
  let status = 503;
  const there = await serve((req, res) => { keys.push(req.headers['idempotency-key']); res.writeHead(status).end(); });
  const options = { storage: storage(), key: 'cart-7', maxAttempts: 1, keyLifetime: 1000 };
  const buy = () => intent('buy', there.url, 1, options).send();
  assert.deepEqual(shown(await buy()), ['attempts', true]);
  const entry = JSON.parse(options.storage.kept.get('oncegate:buy'));
  for (const created of [Date.now() - 1001, Date.now() + 2000]) {
    options.storage.kept.set('oncegate:buy', JSON.stringify(entry.with(3, created)));
    assert.deepEqual(shown(await buy()), ['key-lifetime', true]);
  }
  options.storage.kept.set('oncegate:buy', JSON.stringify(entry));
  status = 200;
  assert.deepEqual(shown(await buy()), ['done', undefined]);
  assert.deepEqual(keys, ['cart-7', 'cart-7']);
  there.close();
});

test('a storage that throws: the page remembers', async () => {
  const { intent, isUnsettled, forget } = await load();
  const denied = () => { throw new DOMException('denied', 'SecurityError'); };
  const options = { storage: { getItem: denied, setItem: denied, removeItem: denied }, fetch: () => Promise.reject(new TypeError('away')), maxAttempts: 1 };
  const buy = intent('buy', 'http://localhost/', 1, options);
  assert.equal(buy.isKept, true);
  const { key } = await buy.send();
  assert.deepEqual([buy.isKept, isUnsettled('buy', options), intent('buy', 'http://localhost/', 1, options).key], [false, true, key]);
  forget('buy', options);
  assert.deepEqual([isUnsettled('buy', options), buy.key === key], [false, false]);
});

test('without a document nothing is kept for everybody: it throws', async () => {
  const { intent, isUnsettled } = await load();
  assert.throws(() => intent('buy', 'http://localhost/', 1).send(), ReferenceError);
  assert.throws(() => isUnsettled('buy'), ReferenceError);
});

test('while offline nothing is sent', async () => {
  const { intent } = await load();
  let isOnline = false;
  let requests = 0;
  const fetch = async () => { requests += 1; return new Response('', { status: 201 }); };
  const options = { storage: storage(), fetch, isOnline: () => isOnline };
  const outcome = await intent('late', 'http://localhost/', 1, { ...options, deadline: 100 }).send();
  assert.deepEqual([...shown(outcome), outcome.attempts, requests], ['offline', false, 0, 0]);
  const target = new EventTarget();
  globalThis.addEventListener = target.addEventListener.bind(target);
  try {
    const sending = intent('late', 'http://localhost/', 1, { ...options, deadline: 5000 }).send();
    await new Promise((done) => { setTimeout(done, 20); });
    assert.equal(requests, 0);
    isOnline = true;
    target.dispatchEvent(new Event('online'));
    assert.deepEqual([...shown(await sending), requests], ['done', undefined, 1]);
  } finally {
    delete globalThis.addEventListener;
  }
});

test('Retry-After, the deadline and the budget', async () => {
  const { intent } = await load();
  const times = [];
  const fetch = async () => {
    times.push(performance.now());
    return times.length === 1 ? new Response('', { status: 503, headers: { 'retry-after': '1' } }) : new Response('', { status: 201 });
  };
  const options = { storage: storage() };
  const outcome = await intent('wait', 'http://localhost/', 1, { ...options, fetch }).send();
  assert.equal(outcome.verdict, 'done');
  assert.ok(times[1] - times[0] >= 999, String(times));
  const dated = (after, date) => async () => new Response('', { status: 503, headers: { 'retry-after': after, ...(date === undefined ? {} : { date }) } });
  const after = async (...shape) => (await intent(String(shape), 'http://localhost/', 1, { ...options, fetch: dated(...shape), maxAttempts: 1 }).send()).retryAfter;
  assert.deepEqual(
    [await after('7'), await after('soon'), await after('Tue, 24 Nov 2026 18:00:05 GMT'), await after('Tue, 24 Nov 2026 18:00:05 GMT', 'Tue, 24 Nov 2026 18:00:03 GMT'), await after('Tue, 24 Nov 2020 18:00:05 GMT', 'Tue, 24 Nov 2026 18:00:03 GMT')],
    [7000, 0, 0, 2000, 0],
  );
  const end = await intent('end', 'http://localhost/', 1, { ...options, fetch: () => Promise.reject(new Error('away')), deadline: 1 }).send();
  assert.deepEqual(shown(end), ['deadline', true]);
  const reasons = [];
  let requests = 0;
  const away = async () => { requests += 1; return new Response('', { status: 503 }); };
  const random = Math.random;
  Math.random = () => 0;
  try {
    for (let at = 0; at < 40; at += 1) reasons.push((await intent(`b${at}`, 'http://localhost/', 1, { ...options, fetch: away }).send()).reason);
  } finally {
    Math.random = random;
  }
  assert.deepEqual([reasons[0], reasons.at(-1)], ['attempts', 'budget']);
  assert.ok(requests <= 40 + 101, String(requests));
});
