// The library in Debian's Chromium, before a service with the library for Node.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { fileURLToPath } from 'node:url';
import { after, before, beforeEach, test } from 'node:test';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';
import { MemoryStore, node, Oncegate } from '../../node/dist/esm/index.js';

const here = fileURLToPath(new URL('./', import.meta.url));
let browser, server, port, service;

/** Charges, and what happens to a request after it was charged. */
function reset() {
  service = { charges: [], keys: [], hold: undefined };
}

const page = (path) => readFileSync(`${here}${path}`, 'utf8');
const protectedService = node(new Oncegate({ store: new MemoryStore() }), { scope: 'single-tenant', wait: '30s' }, async (req, res) => {
  let body = '';
  for await (const part of req) body += part;
  service.charges.push(body);
  await service.hold;
  res.writeHead(201, { 'content-type': 'application/json' }).end(`{"charge":${service.charges.length}}`);
});

before(async () => {
  const script = { bundle: true, format: 'esm', jsx: 'automatic', write: false, define: { 'process.env.NODE_ENV': '"development"' } };
  const react = (await build({ ...script, entryPoints: [`${here}pages/react.jsx`] })).outputFiles[0].text;
  await build({ ...script, entryPoints: [`${here}pages/react.jsx`], write: true, platform: 'node', packages: 'external', outfile: `${here}../node_modules/.cache/page.mjs` });
  const rendered = execFileSync(process.execPath, ['--input-type=module', '-e', "import { renderToString } from 'react-dom/server'; import { createElement } from 'react'; import { Page } from './node_modules/.cache/page.mjs'; console.log(renderToString(createElement(Page)))"], { cwd: `${here}..`, encoding: 'utf8' });
  const html = (root) => `<!doctype html><meta charset="utf-8"><title>Shop</title><div id="root">${root}</div><script type="module" src="/react.js"></script>`;
  server = createServer((req, res) => {
    const { pathname } = new URL(req.url, 'http://localhost');
    const send = (type, text) => res.writeHead(200, { 'content-type': `${type}; charset=utf-8` }).end(text);
    const cors = { 'access-control-allow-origin': '*', 'access-control-allow-headers': 'idempotency-key, content-type', 'access-control-expose-headers': 'idempotent-replayed, idempotency-status, retry-after, date' };
    if (pathname === '/') return send('text/html', page('pages/form.html'));
    if (pathname === '/thanks') return send('text/html', '<!doctype html><title>Thanks</title><a href="/?thanks">Again</a>');
    if (pathname === '/react') return send('text/html', html(''));
    if (pathname === '/rendered') return send('text/html', html(rendered.trim()));
    if (pathname === '/react.js') return send('text/javascript', react);
    if (pathname === '/frame') return send('text/html', `<!doctype html><iframe sandbox="allow-scripts allow-forms" srcdoc='${page('pages/form.html').replaceAll("'", '&apos;')}'></iframe>`);
    if (pathname.startsWith('/dist/')) return res.writeHead(200, { 'content-type': 'text/javascript', 'access-control-allow-origin': '*' }).end(page(`..${pathname}`));
    if (pathname === '/moved') return res.writeHead(303, { location: '/thanks' }).end();
    if (pathname !== '/charges') return res.writeHead(404).end();
    for (const [name, value] of Object.entries(cors)) res.setHeader(name, value);
    if (req.method === 'OPTIONS') return res.writeHead(204).end();
    service.keys.push(req.headers['idempotency-key']);
    return protectedService(req, res);
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  ({ port } = server.address());
  browser = await chromium.launch({
    executablePath: '/usr/bin/chromium',
    // Playwright turns the cache of pages for the back button off; users have it.
    ignoreDefaultArgs: ['--disable-back-forward-cache'],
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync', `--host-resolver-rules=MAP shop.test 127.0.0.1`],
  });
});
after(async () => {
  await browser?.close();
  server?.closeAllConnections();
  server?.close();
});
beforeEach(reset);

const ready = (tab) => tab.waitForSelector('body[data-ready]');
async function open(path, { host = '127.0.0.1', context } = {}) {
  const own = context ?? (await browser.newContext());
  own.setDefaultTimeout(Number(process.env.DEADLINE ?? 60_000));
  const tab = await own.newPage();
  tab.faults = [];
  tab.on('pageerror', (error) => tab.faults.push(String(error)));
  await tab.goto(`http://${host}:${port}${path}`);
  await ready(tab);
  return tab;
}
const hold = () => { let release; service.hold = new Promise((done) => { release = done; }); return release; };
const until = async (held) => { for (const end = Date.now() + 60_000; !held(); ) { assert.ok(Date.now() < end, 'the time is over'); await new Promise((done) => { setTimeout(done, 10); }); } };
const state = (tab, value) => tab.waitForSelector(`form[data-oncegate=${value}]`);
const pay = (tab) => tab.click('button[name=pay]');
const outcomes = (tab) => tab.evaluate(() => window.outcomes);

test('a double click is one request, and the button says that it is pending', async () => {
  const release = hold();
  const tab = await open('/');
  await tab.dblclick('button[name=pay]');
  await state(tab, 'pending');
  assert.deepEqual(await tab.$eval('button', (button) => [button.ariaDisabled, button === document.activeElement, button.disabled]), ['true', true, false]);
  assert.equal(await tab.getAttribute('form', 'aria-busy'), 'true');
  await tab.click('button[name=pay]', { force: true });
  await tab.focus('input[name=amount]');
  await tab.keyboard.press('Enter');
  await tab.evaluate(() => document.querySelector('form').requestSubmit());
  release();
  await state(tab, 'done');
  assert.equal(await tab.getAttribute('button', 'aria-disabled'), 'false');
  assert.deepEqual([service.charges, service.keys.length], [['id=7&amount=5&pay=now'], 1]);
  assert.deepEqual(tab.faults, []);
});

test('a reload in the middle: the page does not know, and the same key settles it', async () => {
  const release = hold();
  const tab = await open('/');
  await pay(tab);
  await until(() => service.charges.length === 1);
  await tab.reload();
  await ready(tab);
  await state(tab, 'unknown');
  assert.ok(await tab.isVisible('text=We do not know'));
  await tab.fill('input[name=amount]', '6');
  await pay(tab);
  await until(async () => true);
  await tab.waitForFunction(() => window.outcomes.length === 1);
  assert.equal((await outcomes(tab))[0].reason, 'earlier-intent');
  await tab.fill('input[name=amount]', '5');
  await pay(tab);
  release();
  await state(tab, 'done');
  assert.deepEqual([service.charges.length, new Set(service.keys).size, (await outcomes(tab))[1].isReplayed], [1, 1, true]);
});

test('offline: nothing is sent until the network is back', async () => {
  const tab = await open('/');
  await tab.context().setOffline(true);
  await pay(tab);
  await state(tab, 'pending');
  assert.equal(service.keys.length, 0);
  await tab.context().setOffline(false);
  await state(tab, 'done');
  assert.deepEqual([service.charges.length, (await outcomes(tab))[0].attempts], [1, 1]);
});

test('the network goes in the middle: sent again, charged once', async () => {
  const release = hold();
  const tab = await open('/');
  await pay(tab);
  await until(() => service.charges.length === 1);
  server.closeAllConnections();
  release();
  await state(tab, 'done');
  // Chromium itself sends a request again if its connection was kept from an earlier one, so the library may see one attempt.
  assert.deepEqual([service.charges.length, new Set(service.keys).size, service.keys.length > 1], [1, 1, true]);
});

for (const isFrozen of [true, false]) {
  test(`back after it was done is the same purchase, and a new visit is a new one (${isFrozen ? 'kept' : 'loaded again'})`, async () => {
    const tab = await open('/?thanks');
    // A page with a listener for `unload` is not kept by the browser.
    if (!isFrozen) await tab.evaluate(() => { window.addEventListener('unload', () => undefined); });
    await pay(tab);
    // Until it is loaded, the browser may have no page to go back from.
    await tab.waitForURL('**/thanks');
    await tab.goBack({ waitUntil: 'commit' });
    await ready(tab);
    assert.equal(await tab.evaluate(() => window.wasFrozen), isFrozen);
    assert.equal(await tab.getAttribute('button', 'aria-disabled'), isFrozen ? 'false' : null);
    await pay(tab);
    await tab.waitForURL('**/thanks', { waitUntil: 'commit' });
    await until(() => service.keys.length === 2);
    assert.deepEqual([service.charges.length, new Set(service.keys).size], [1, 1]);
    await tab.click('a');
    await tab.waitForURL('**/?thanks', { waitUntil: 'commit' });
    await ready(tab);
    await pay(tab);
    await tab.waitForURL('**/thanks', { waitUntil: 'commit' });
    assert.deepEqual([service.charges.length, new Set(service.keys).size], [2, 2]);
  });
}

test('a reload after it was done is the same purchase', async () => {
  const tab = await open('/');
  await pay(tab);
  await state(tab, 'done');
  await tab.reload();
  await ready(tab);
  assert.equal(await tab.getAttribute('form', 'data-oncegate'), null);
  await pay(tab);
  await state(tab, 'done');
  assert.deepEqual([service.charges.length, (await outcomes(tab))[0].isReplayed], [1, true]);
});

test('two tabs: a key of the service is one purchase, and random keys are two', async () => {
  const context = await browser.newContext();
  const tabs = async (path) => {
    reset();
    const [one, two] = [await open(path, { context }), await open(path, { context })];
    const release = hold();
    await Promise.all([pay(one), pay(two)]);
    await until(() => service.keys.length === 2);
    release();
    await Promise.all([state(one, 'done'), state(two, 'done')]);
    return service.charges.length;
  };
  assert.equal(await tabs('/?key=cart-1'), 1);
  assert.equal(await tabs('/'), 2);
});

test('two tabs that share localStorage: what is in doubt in one has its key in the other', async () => {
  const context = await browser.newContext();
  const one = await open('/?shared', { context });
  const release = hold();
  await pay(one);
  await until(() => service.charges.length === 1);
  await one.close();
  const two = await open('/?shared', { context });
  await state(two, 'unknown');
  await pay(two);
  release();
  await state(two, 'done');
  assert.deepEqual([service.charges.length, new Set(service.keys).size], [1, 1]);
});

test('a duplicated tab has the intent of the first one', async () => {
  const release = hold();
  const one = await open('/');
  await pay(one);
  await until(() => service.charges.length === 1);
  // A tab that is opened by a page gets a copy of its sessionStorage, as a duplicated one does.
  const [two] = await Promise.all([one.context().waitForEvent('page'), one.evaluate(() => { window.open('/'); })]);
  await ready(two);
  await state(two, 'unknown');
  await pay(two);
  release();
  await Promise.all([state(one, 'done'), state(two, 'done')]);
  assert.deepEqual([service.charges.length, new Set(service.keys).size], [1, 1]);
});

test('a page without TLS, which has no crypto.randomUUID', async () => {
  const tab = await open('/', { host: 'shop.test' });
  assert.deepEqual(await tab.evaluate(() => [isSecureContext, typeof crypto.randomUUID]), [false, 'undefined']);
  await pay(tab);
  await state(tab, 'done');
  assert.match(service.keys[0], /^[0-9a-f]{8}-[0-9a-f]{4}-4/);
});

test('a frame of another origin without storage, through CORS', async () => {
  const context = await browser.newContext();
  const tab = await context.newPage();
  await tab.goto(`http://127.0.0.1:${port}/frame`);
  const frame = tab.frames()[1];
  await frame.waitForSelector('form');
  // The scripts of the frame have the address of the page around it as their base.
  await frame.waitForSelector('body[data-ready]');
  assert.equal(await frame.evaluate(() => { try { return String(sessionStorage); } catch (error) { return error.name; } }), 'SecurityError');
  await frame.dblclick('button[name=pay]');
  await frame.waitForSelector('form[data-oncegate=done]');
  await frame.click('button[name=pay]');
  await until(() => service.keys.length === 2);
  await frame.waitForFunction(() => window.outcomes.length === 2);
  assert.deepEqual([service.charges.length, (await frame.evaluate(() => window.outcomes))[1].isReplayed], [1, true]);
});

test('a redirection is not taken for the response', async () => {
  const tab = await open('/?to');
  await tab.$eval('form', (form) => form.setAttribute('action', '/moved'));
  await pay(tab);
  await state(tab, 'unknown');
  assert.equal((await outcomes(tab))[0].reason, 'unknown');
});

test('React in strict mode: effects that run twice, and a component that goes away', async () => {
  const release = hold();
  const tab = await open('/react?at-once');
  await tab.waitForSelector('#pay[data-state=pending]');
  await tab.waitForSelector('#twin[data-state=pending]');
  await tab.click('#toggle');
  await tab.waitForSelector('#pay', { state: 'detached' });
  await tab.click('#toggle');
  await tab.waitForSelector('#pay[data-state=pending]');
  release();
  await tab.waitForSelector('#pay[data-state=done]');
  assert.deepEqual([service.charges, service.keys.length], [['{"amount":5}'], 1]);
  await tab.click('text=Pay');
  await tab.waitForSelector('#pay[data-replayed=true]');
  assert.equal(service.charges.length, 1);
  await tab.click('#new');
  await tab.waitForSelector('#pay[data-state=idle]');
  await tab.waitForSelector('#twin[data-state=idle]');
  await tab.click('text=Pay');
  await tab.waitForSelector('#pay[data-state=done]');
  assert.equal(service.charges.length, 2);
  assert.deepEqual(tab.faults, []);
});

test('React rendered on a server: an intent in doubt is shown after the page was loaded again', async () => {
  const release = hold();
  const tab = await open('/rendered');
  await tab.waitForSelector('#pay[data-state=idle]');
  await tab.click('text=Pay');
  await until(() => service.charges.length === 1);
  await tab.reload();
  await tab.waitForSelector('#pay[data-state=unknown]');
  assert.equal(await tab.evaluate(() => window.recovered), undefined);
  await tab.click('text=Pay');
  await tab.waitForSelector('#twin[data-state=pending]');
  release();
  await tab.waitForSelector('#pay[data-state=done]');
  await tab.waitForSelector('#twin[data-state=done]');
  assert.deepEqual([service.charges.length, tab.faults], [1, []]);
});
