// The packed library in empty projects, its start, and the service for the table of cases.
import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, utimesSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join, relative } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { after, before, test } from 'node:test';
import { startPostgres } from './servers.js';

const here = fileURLToPath(new URL('../', import.meta.url));
let dir;
before(() => {
  dir = mkdtempSync(join(tmpdir(), 'oncegate-node-package-'));
  const tarball = execFileSync('npm', ['pack', '--silent', '--ignore-scripts', '--pack-destination', dir], { cwd: here, encoding: 'utf8' }).trim();
  writeFileSync(join(dir, 'package.json'), '{"private":true}');
  execFileSync('npm', ['install', '--silent', '--no-audit', '--no-fund', '--offline', `./${tarball}`], { cwd: dir });
});
after(() => rmSync(dir, { recursive: true, force: true }));

const run = (file, text) => {
  writeFileSync(join(dir, file), text);
  return execFileSync(process.execPath, [file], { cwd: dir, encoding: 'utf8' });
};

test('the packed library works in an empty ESM and an empty CommonJS project, with types', () => {
  const use = "const o = new Oncegate({ store: new MemoryStore() }); const f = idempotent(o, { name: 'f', key: () => 'k', errors: 'keep' }, () => 7); f().then(console.log);";
  assert.equal(run('use.mjs', `import { idempotent, MemoryStore, Oncegate } from 'oncegate'; ${use}`), '7\n');
  assert.equal(run('use.cjs', `const { idempotent, MemoryStore, Oncegate } = require('oncegate'); ${use}`), '7\n');
  const files = execFileSync('npm', ['pack', '--dry-run', '--json', '--ignore-scripts'], { cwd: here, encoding: 'utf8' });
  const names = JSON.parse(files)[0].files.map(({ path }) => path);
  assert.ok(!names.includes('dist/.built'));
  assert.ok(names.every((name) => /^(dist\/|README\.md$|CHANGELOG\.md$|LICENSE-|package\.json$)/.test(name)), String(names));
  symlinkSync(join(here, 'node_modules/@types'), join(dir, 'node_modules/@types'));
  const typed = `import { express, MemoryStore, Oncegate, PostgresStore, withIdempotency } from 'oncegate';
import app from 'express'; import pg from 'pg';
const o = new Oncegate({ store: new PostgresStore(new pg.Pool()), service: 'shop' });
app().use(express(o, { scope: 'single-tenant' }));
export const POST = withIdempotency(o, {}, (request: Request) => Response.json({ url: request.url }));
// @ts-expect-error: a mistyped option
express(new Oncegate({ store: new MemoryStore() }), { reqireKey: true });
`;
  for (const [file, module] of [['typed.mts', 'nodenext'], ['typed.cts', 'nodenext']]) {
    writeFileSync(join(dir, file), typed);
    execFileSync(process.execPath, [join(here, 'node_modules/typescript/bin/tsc'), '--noEmit', '--strict', '--skipLibCheck', '--module', module, '--moduleResolution', 'nodenext', '--target', 'es2022', '--esModuleInterop', file], { cwd: dir, stdio: 'inherit' });
  }
});

test('what the README shows compiles under strict', () => {
  for (const name of ['express', 'fastify', 'hono', 'pg', '@types', '@fastify']) {
    if (!existsSync(join(dir, 'node_modules', name))) symlinkSync(join(here, 'node_modules', name), join(dir, 'node_modules', name));
  }
  const blocks = [...readFileSync(join(here, 'README.md'), 'utf8').matchAll(/```js\n([^]*?)```/g)].map(([, block]) => block);
  assert.equal(blocks.length, 5);
  const names = 'attemptOf, Client, derivedKey, express, fastify, hono, idempotent, IdSecret, Keyring, MemoryStore, node, Oncegate, PostgresStore, SealedStore, transaction, withIdempotency';
  const preamble = `import { ${names}, type Attempt } from 'oncegate';
import app from 'express'; import Fastify from 'fastify'; import { createServer } from 'node:http'; import { Hono } from 'hono'; import pg from 'pg';
interface Order { id: string; customer: string; amount: number }
declare const order: Order; declare const bank: { charge(order: Order): Promise<{ id: string }> };
declare const oncegate: Oncegate; declare const pool: pg.Pool; declare const url: string; declare const body: string;
`;
  const more = `{
  const options = { scope: 'single-tenant', retention: '24h' };
  app().use(express(oncegate, options));
  const server = Fastify();
  await server.register(fastify, { oncegate, ...options, scope: (request: { user?: { id: string } }) => request.user?.id });
  await server.register(fastify, { oncegate, prefix: '/v1', scope: 'required-header:authorization' });
  new Hono().use(hono(oncegate, options)).post('/', (c) => c.json({ key: attemptOf(c.req.raw)?.key }));
  createServer(node(oncegate, options, (req, res) => { res.end(attemptOf(req)?.downstreamKey('bank')); }));
  withIdempotency(oncegate, options, async (request: Request) => Response.json(await request.json(), { status: 201 }));
  const one = idempotent(oncegate, { name: 'a', key: (own) => own.id, input: (own) => own.amount, caller: (own) => ['customer', own.customer], errors: 'unknown' }, async (own: Order) => bank.charge(own));
  const receipt: { id: string } = await one(order);
  const none = idempotent(oncegate, { name: 'b', key: () => 'k', errors: 'keep' }, (attempt) => attempt.number + receipt.id.length);
  const two = idempotent(oncegate, { name: 'c', key: (own, at) => \`\${own.id}-\${at}\`, errors: (error) => (error instanceof TypeError ? 'release' : 'unknown') }, (own: Order, at: number) => own.amount + at);
  const typed = idempotent(oncegate, { name: 'd', key: (own: Order) => own.id, errors: 'keep' }, (own, attempt) => own.amount + attempt.number);
  const three = idempotent(oncegate, { name: 'e', key: (a: string, b: number, c: Order) => a + String(b) + c.id, errors: 'keep' }, (a, b, c, attempt) => [a, b, c.amount, attempt.key]);
  const sum: number = (await none()) + (await two(order, 1)) + (await typed(order)) + (await three('a', 1, order)).length;
  new SealedStore(new MemoryStore(), Keyring.parse(String(sum)));
  new Oncegate({ store: new PostgresStore(pool), service: 'shop', idSecret: process.env['ONCEGATE_ID_SECRET'] });
  new Oncegate({ store: new MemoryStore(), idSecret: IdSecret.parse(url) });
  derivedKey('payment', ['order-7', 2]);
  // @ts-expect-error: a part that is no text
  derivedKey('payment', [7n]);
}
`;
  blocks.forEach((block, at) => {
    const isWhole = block.startsWith('import ');
    const text = block.replaceAll('…', '{}').replace('(order, attempt) =>', '(order: Order, attempt: Attempt) =>');
    writeFileSync(join(dir, `readme-${at}.mts`), isWhole ? text : `${preamble}{\n${text}}\nexport {};\n`);
  });
  writeFileSync(join(dir, 'readme-more.mts'), `${preamble}${more}export {};\n`);
  const files = [...blocks.keys(), 'more'].map((at) => `readme-${at}.mts`);
  const flags = ['--noEmit', '--strict', '--skipLibCheck', '--module', 'nodenext', '--moduleResolution', 'nodenext', '--target', 'es2022', '--esModuleInterop', '--types', 'node'];
  execFileSync(process.execPath, [join(here, 'node_modules/typescript/bin/tsc'), ...flags, ...files], { cwd: dir, stdio: 'inherit' });
});

test('a package of a clone has the compiled library', () => {
  const clone = join(dir, 'clone');
  const isSource = (path) => !/^(dist|node_modules)\b/.test(relative(here, path));
  cpSync(here, clone, { recursive: true, filter: isSource });
  symlinkSync(join(here, 'node_modules'), join(clone, 'node_modules'));
  execFileSync('npm', ['pack', '--silent'], { cwd: clone });
  const files = execFileSync('tar', ['-tzf', 'oncegate-0.1.0.tgz'], { cwd: clone, encoding: 'utf8' });
  for (const file of ['dist/esm/index.js', 'dist/esm/index.d.ts', 'dist/cjs/index.js', 'dist/cjs/package.json']) assert.match(files, new RegExp(`^package/${file}$`, 'm'));
});

/** The code of the README with this word in it, on a free port, which it prints. */
function example(word) {
  const blocks = readFileSync(join(here, 'README.md'), 'utf8').matchAll(/```js\n([^]*?)```/g);
  const [text] = [...blocks].map(([, block]) => block).filter((block) => block.includes(word));
  return text.replace('listen(3000)', "listen(0, '127.0.0.1', function () { console.log(this.address().port) })");
}

test('the example for production answers 503 while PostgreSQL is away, and ends by SIGTERM', async () => {
  const postgres = await startPostgres();
  let child;
  let isAway = false;
  try {
    for (const name of ['express', 'pg']) if (!existsSync(join(dir, 'node_modules', name))) symlinkSync(join(here, 'node_modules', name), join(dir, 'node_modules', name));
    writeFileSync(join(dir, 'production.mjs'), example('SIGTERM'));
    child = spawn(process.execPath, ['production.mjs'], { cwd: dir, env: { ...process.env, DATABASE_URL: postgres.url }, stdio: ['ignore', 'pipe', 'ignore'] });
    const [port] = await once(createInterface({ input: child.stdout }), 'line');
    const send = (key) => fetch(`http://127.0.0.1:${port}/charges`, { method: 'POST', headers: { 'Idempotency-Key': key, Authorization: 'Bearer a' } });
    assert.deepEqual([(await send('k')).status, (await send('k')).headers.get('idempotent-replayed')], [201, 'true']);
    isAway = true;
    await postgres.stop();
    // The pool notices its lost connections before or after this request.
    for (let at = 0; at < 3; at += 1) assert.equal((await send(`away-${at}`)).status, 503);
    assert.equal(child.exitCode, null);
    const ended = once(child, 'exit');
    child.kill('SIGTERM');
    assert.deepEqual(await ended, [0, null]);
  } finally {
    child?.kill('SIGKILL');
    if (!isAway) await postgres.stop();
  }
});

test('the start of the README, to the letter', async () => {
  const [, start] = /```js\n([^]*?)```/.exec(readFileSync(join(here, 'README.md'), 'utf8'));
  if (!existsSync(join(dir, 'node_modules/express'))) symlinkSync(join(here, 'node_modules/express'), join(dir, 'node_modules/express'));
  assert.ok(start.trim().split('\n').length <= 10, start);
  writeFileSync(join(dir, 'start.mjs'), start.replace('listen(3000)', "listen(0, '127.0.0.1', function () { console.log(this.address().port) })"));
  const child = spawn(process.execPath, ['start.mjs'], { cwd: dir, stdio: ['ignore', 'pipe', 'inherit'] });
  try {
    const [port] = await once(createInterface({ input: child.stdout }), 'line');
    const send = () => fetch(`http://127.0.0.1:${port}/charges`, { method: 'POST', body: '{"amount": 5}', headers: { 'Idempotency-Key': 'order-1', 'Content-Type': 'application/json' } });
    const [first, second] = [await send(), await send()];
    assert.deepEqual([first.status, second.status, second.headers.get('idempotent-replayed')], [201, 201, 'true']);
    assert.deepEqual([await first.json(), await second.json()], [{ charge: 1, amount: 5 }, { charge: 1, amount: 5 }]);
  } finally {
    child.kill('SIGKILL');
  }
});

test('a second preparation leaves the build alone, and a newer source is built', () => {
  const clone = join(dir, 'prepared');
  cpSync(here, clone, { recursive: true, filter: (path) => !/^(dist|node_modules)\b/.test(relative(here, path)) });
  // A directory of its own, which an installation may empty.
  mkdirSync(join(clone, 'node_modules'));
  for (const name of readdirSync(join(here, 'node_modules'))) if (!name.startsWith('.')) symlinkSync(join(here, 'node_modules', name), join(clone, 'node_modules', name));
  writeFileSync(join(clone, 'node_modules/.package-lock.json'), '{}');
  const prepare = () => execFileSync('./prepare.sh', { cwd: clone, stdio: 'inherit' });
  prepare();
  writeFileSync(join(clone, 'dist/used'), '');
  prepare();
  assert.ok(existsSync(join(clone, 'dist/used')));
  const later = new Date(Date.now() + 2000);
  utimesSync(join(clone, 'src/index.ts'), later, later);
  prepare();
  assert.deepEqual([existsSync(join(clone, 'dist/used')), existsSync(join(clone, 'dist/esm/index.js'))], [false, true]);
});

test('the service for the table of cases', async () => {
  let executions = 0;
  const backend = createServer(async (req, res) => {
    executions += 1;
    const parts = [];
    for await (const part of req) parts.push(part);
    const { method, target, body } = JSON.parse(Buffer.concat(parts));
    const lines = [{ status: 201, fields: [['x-seen', `${method} ${target}`]], length: 3 }, { data: body }, { data: '00ff' }, { end: true }];
    res.end(lines.map((line) => `${JSON.stringify(line)}\n`).join(''));
  }).listen(0, '127.0.0.1');
  await once(backend, 'listening');
  const child = spawn(process.execPath, [join(here, 'cases/service.mjs')], { stdio: ['pipe', 'pipe', 'inherit'] });
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const say = async (line) => {
    child.stdin.write(`${JSON.stringify(line)}\n`);
    return JSON.parse((await lines.next()).value);
  };
  try {
    assert.deepEqual(await say({ settings: { 'rate-limit.caller': '1/s' }, store: 'memory:' }), { unsupported: 'rate-limit.caller' });
    assert.deepEqual(await say({ settings: { 'on-abandoned': 'reconcile' }, store: 'memory:' }), { unsupported: 'on-abandoned' });
    const { address } = await say({ settings: { scope: ['single-tenant'], lease: '250ms', wait: '0s', 'max-in-flight': 10, 'store-timeout': '1s', 'fingerprint.body': 'raw' }, store: 'memory:', backend: `127.0.0.1:${backend.address().port}` });
    const send = () => fetch(`http://${address}/orders?x=1`, { method: 'POST', body: 'a', headers: { 'idempotency-key': 'k' } });
    const [first, second] = [await send(), await send()];
    assert.equal(first.headers.get('x-seen'), 'POST /orders?x=1');
    for (const answer of [first, second]) assert.deepEqual(Buffer.from(await answer.arrayBuffer()), Buffer.from([0x61, 0, 0xff]));
    assert.equal(executions, 1);
    child.stdin.write(`${JSON.stringify({ close: address })}\n`);
    const exited = once(child, 'exit');
    child.stdin.end();
    assert.equal((await exited)[0], 0);
  } finally {
    child.kill('SIGKILL');
    backend.close();
  }
});
