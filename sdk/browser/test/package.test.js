// The packed library in an empty project: its size, its types, and the start of the README.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { after, before, test } from 'node:test';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';
import { serve } from './pages.js';

const here = fileURLToPath(new URL('../', import.meta.url));
let dir;
before(() => {
  dir = mkdtempSync(join(tmpdir(), 'oncegate-browser-package-'));
  const tarball = execFileSync('npm', ['pack', '--ignore-scripts', '--silent', '--pack-destination', dir], { cwd: here, encoding: 'utf8' }).trim();
  writeFileSync(join(dir, 'package.json'), '{"private":true,"type":"module"}');
  execFileSync('npm', ['install', '--silent', '--no-audit', '--no-fund', '--offline', `./${tarball}`], { cwd: dir });
});
after(() => rmSync(dir, { recursive: true, force: true }));

test('the modules are small, and have nothing but themselves', () => {
  const sizes = { 'index.js': 4096, 'form.js': 700, 'react.js': 600 };
  for (const [name, limit] of Object.entries(sizes)) {
    const text = readFileSync(join(dir, 'node_modules/oncegate-browser/dist', name));
    const size = gzipSync(text, { level: 9 }).length;
    assert.ok(size <= limit, `${name} has ${size} bytes with gzip`);
    const imports = [...String(text).matchAll(/from"([^"]+)"/g)].map(([, from]) => from);
    assert.deepEqual(imports.filter((from) => from !== './index.js' && from !== 'react'), []);
  }
  const files = JSON.parse(execFileSync('npm', ['pack', '--ignore-scripts', '--dry-run', '--json'], { cwd: here, encoding: 'utf8' }))[0].files.map(({ path }) => path);
  assert.ok(files.every((name) => /^(dist\/|README\.md$|CHANGELOG\.md$|LICENSE-|package\.json$)/.test(name)), String(files));
  const { dependencies } = JSON.parse(readFileSync(join(here, 'package.json'), 'utf8'));
  assert.equal(dependencies, undefined);
});

test('it is imported on a server, and has types', () => {
  const use = "import { intent, stateOf } from 'oncegate-browser'; import { submitOnce } from 'oncegate-browser/form'; const twice = submitOnce(async () => 7); const [a, b] = [twice(), twice()]; console.log(typeof intent, typeof stateOf, a === b, await a, await twice());";
  writeFileSync(join(dir, 'use.js'), use);
  assert.equal(execFileSync(process.execPath, ['use.js'], { cwd: dir, encoding: 'utf8' }), 'function function true 7 7\n');
  symlinkSync(join(here, 'node_modules/@types'), join(dir, 'node_modules/@types'));
  writeFileSync(join(dir, 'typed.tsx'), `import { intent, stateOf, type Outcome } from 'oncegate-browser';
import { submitOnce } from 'oncegate-browser/form';
import { useIdempotentMutation } from 'oncegate-browser/react';
export async function pay(): Promise<string> {
  const outcome: Outcome = await intent('pay', '/charges', { amount: 5 }, { init: { headers: { 'x-a': 'b' } }, storage: localStorage }).send(AbortSignal.timeout(5));
  if (outcome.kind === 'open') return outcome.mayHaveTakenEffect ? outcome.reason : outcome.key;
  // @ts-expect-error: a definite outcome has no reason
  outcome.reason;
  return outcome.verdict + stateOf(outcome) + outcome.response.status;
}
export const stop: () => void = submitOnce(document.forms[0]!, { name: 'a', onOutcome: (outcome) => outcome.attempts });
export const once: (amount: number) => Promise<string> = submitOnce(async (amount: number) => String(amount));
export const Pay = () => useIdempotentMutation<{ amount: number }>('pay', '/charges').state;
// @ts-expect-error: a mistyped option
intent('pay', '/charges', 1, { atempts: 3 });
`);
  const tsc = join(here, 'node_modules/typescript/bin/tsc');
  for (const [module, resolution] of [['nodenext', 'nodenext'], ['esnext', 'bundler']]) {
    execFileSync(process.execPath, [tsc, '--noEmit', '--strict', '--module', module, '--moduleResolution', resolution, '--target', 'es2022', '--lib', 'es2022,dom,dom.iterable', '--jsx', 'react-jsx', 'typed.tsx'], { cwd: dir, stdio: 'inherit' });
  }
});

test('the start of the README, to the letter', async () => {
  const [, start] = /```js\n([^]*?)```/.exec(readFileSync(join(here, 'README.md'), 'utf8'));
  assert.ok(start.trim().split('\n').length <= 10, start);
  writeFileSync(join(dir, 'start.js'), start);
  const script = (await build({ entryPoints: [join(dir, 'start.js')], bundle: true, format: 'esm', write: false })).outputFiles[0].text;
  const seen = [];
  const there = await serve(async (req, res) => {
    if (req.method !== 'POST') {
      res.writeHead(200, { 'content-type': 'text/html' }).end(`<!doctype html><title>Shop</title><button id="pay">Pay</button><p id="state"></p><script type="module">${script}</script>`);
      return;
    }
    let body = '';
    for await (const part of req) body += part;
    seen.push([req.headers['idempotency-key'], body]);
    if (seen.length === 1) req.socket.destroy();
    else res.writeHead(201).end();
  });
  const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'] });
  try {
    const page = await browser.newPage();
    await page.goto(there.url);
    await page.click('#pay');
    await page.waitForSelector('#state:text("done")', { timeout: 60_000 });
    assert.equal(new Set(seen.map(String)).size, 1);
    assert.equal(seen[0][1], '{"item":"tea","amount":5}');
  } finally {
    await browser.close();
    there.close();
  }
});
