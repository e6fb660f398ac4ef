// The packed library in empty projects, its start, and the service for the table of cases.
import assert from 'node:assert/strict';
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { after, before, test } from 'node:test';

const here = fileURLToPath(new URL('../', import.meta.url));
let dir;
before(() => {
  dir = mkdtempSync(join(tmpdir(), 'oncegate-node-package-'));
  const tarball = execFileSync('npm', ['pack', '--silent', '--pack-destination', dir], { cwd: here, encoding: 'utf8' }).trim();
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
  const files = execFileSync('npm', ['pack', '--dry-run', '--json'], { cwd: here, encoding: 'utf8' });
  const names = JSON.parse(files)[0].files.map(({ path }) => path);
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

test('the start of the README, to the letter', async () => {
  const [, start] = /```js\n([^]*?)```/.exec(readFileSync(join(here, 'README.md'), 'utf8'));
  symlinkSync(join(here, 'node_modules/express'), join(dir, 'node_modules/express'));
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

test('the service for the table of cases', async () => {
  let executions = 0;
  const backend = createServer(async (req, res) => {
    executions += 1;
    const parts = [];
    for await (const part of req) parts.push(part);
    const { method, target, body } = JSON.parse(Buffer.concat(parts));
    res.end(JSON.stringify({ status: 201, fields: [['x-seen', `${method} ${target}`]], body: `${body}00ff` }));
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
    const { address } = await say({ settings: { scope: ['single-tenant'], lease: '250ms', wait: '0s', 'max-in-flight': 10, 'store-timeout': '1s', 'fingerprint.body': 'raw' }, store: 'memory:' });
    const send = () => fetch(`http://${address}/orders?x=1`, { method: 'POST', body: 'a', headers: { 'x-case': `127.0.0.1:${backend.address().port}`, 'idempotency-key': 'k' } });
    const [first, second] = [await send(), await send()];
    assert.equal(first.headers.get('x-seen'), 'POST /orders?x=1');
    for (const answer of [first, second]) assert.deepEqual(Buffer.from(await answer.arrayBuffer()), Buffer.from([0x61, 0, 0xff]));
    assert.equal(executions, 1);
    assert.deepEqual(await say({ close: address }), { closed: address });
    const exited = once(child, 'exit');
    child.stdin.end();
    assert.equal((await exited)[0], 0);
  } finally {
    child.kill('SIGKILL');
    backend.close();
  }
});
