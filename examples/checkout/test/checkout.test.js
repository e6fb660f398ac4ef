// The shop in Debian's Chromium: each button, with the library and behind the sidecar. With SCREENSHOTS, a directory, it keeps pictures.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { after, before, describe, test } from 'node:test';
import { chromium } from 'playwright-core';

const here = fileURLToPath(new URL('../', import.meta.url));
const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const deadline = Number(process.env.DEADLINE ?? 60_000);
const desktop = { viewport: { width: 1200, height: 1000 } };
const phone = { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true };

let browser;
before(async () => {
  browser = await chromium.launch({
    executablePath: '/usr/bin/chromium',
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
});
after(() => browser?.close());

for (const [mode, flags] of [['library', []], ['sidecar', ['--sidecar']]]) {
  describe(`with the ${mode}`, () => {
    let shop, url;
    before(async () => {
      shop = spawn(process.execPath, ['server.js', ...flags], { cwd: here, env: { ...process.env, PORT: '0' }, stdio: ['ignore', 'pipe', 'ignore'] });
      const ended = once(shop, 'exit').then(() => { throw new Error('the shop did not start'); });
      ended.catch(() => undefined);
      const [line] = await Promise.race([once(createInterface({ input: shop.stdout }), 'line'), ended]);
      [url] = /http:\S+/.exec(line);
    });
    after(async () => {
      if (shop.exitCode !== null || shop.signalCode !== null) return;
      const ended = once(shop, 'exit');
      shop.kill('SIGTERM');
      await ended;
    });

    async function open(options = desktop) {
      const context = await browser.newContext({ ...options, reducedMotion: 'reduce' });
      context.setDefaultTimeout(deadline);
      const page = await context.newPage();
      page.faults = [];
      page.on('pageerror', (error) => page.faults.push(String(error)));
      await page.goto(url);
      await page.click('text=Empty the ledger');
      await page.waitForSelector('.verdict[data-lane=plain][data-charges="0"]');
      return page;
    }
    const charges = (page, lane, count) => page.waitForSelector(`.verdict[data-lane=${lane}][data-charges="${count}"]`);
    const status = (page, lane, state) => page.waitForSelector(`.status[data-lane=${lane}][data-state=${state}]`);
    const pay = (page, lane) => page.click(`.${lane} .buy`);
    const ledger = async () => (await fetch(`${url}/api/ledger`)).json();

    async function inspect(page, name) {
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }));
      assert.deepEqual(violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ target, failureSummary }) => `${target} ${failureSummary}`).join('; ')}`), [], name);
      const [wide, width] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
      assert.ok(wide <= width, `${name} is ${wide} wide on a screen of ${width}`);
      assert.deepEqual(page.faults, [], name);
      if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/${mode}-${name}.png`, fullPage: true });
    }

    for (const fault of mode === 'sidecar' ? ['lose-reply', 'crash'] : ['double-click', 'lose-reply', 'crash', 'reload']) {
      test(`${fault}: two charges without keys, and one with`, async () => {
        const page = await open();
        await page.click(`[data-fault=${fault}]`);
        if (fault === 'reload') {
          await page.waitForEvent('load');
          await status(page, 'safe', 'unknown');
          await inspect(page, 'unknown');
        }
        await charges(page, 'plain', 2);
        await status(page, 'plain', 'done');
        // The sidecar cannot know what its service did before it died. The page says so, and nothing is charged twice.
        const isLost = fault === 'crash' && mode === 'sidecar';
        await status(page, 'safe', isLost ? 'unknown' : 'done');
        if (isLost) await page.waitForSelector('.status[data-lane=safe]:text("and ask the bank")');
        await charges(page, 'safe', 1);
        await page.waitForSelector('footer button:enabled');
        const { orders, requests, charges: all } = await ledger();
        assert.deepEqual([orders, all.filter(({ lane }) => lane === 'plain').length, all.filter(({ lane }) => lane === 'safe').length], [1, 2, 1]);
        assert.equal(requests.safe, fault === 'double-click' ? 1 : requests.safe);
        if (fault !== 'double-click' && !isLost) assert.ok(requests.safe > 1);
        await inspect(page, fault);
        // The next order is charged again, although it is for the same.
        await page.click('footer button');
        await pay(page, 'safe');
        await page.waitForSelector('.verdict[data-lane=safe]:text("2 charges for 2 orders")');
        await page.context().close();
      });
    }

    if (mode === 'sidecar') return;

    test('offline, and the back button', async () => {
      const page = await open();
      await page.context().setOffline(true);
      await pay(page, 'safe');
      await status(page, 'safe', 'pending');
      await pay(page, 'plain');
      await status(page, 'plain', 'error');
      await page.context().setOffline(false);
      await status(page, 'safe', 'done');
      await page.waitForSelector('.verdict[data-lane=safe]:text("1 charge for 1 order")');
      await page.goto('about:blank');
      await page.goBack();
      await page.waitForSelector('.status[data-lane=safe][data-state=idle]', { state: 'attached' });
      await pay(page, 'safe');
      await page.waitForSelector('text=It was paid before');
      assert.deepEqual([(await ledger()).charges.length, (await ledger()).orders], [1, 1]);
      await page.context().close();
    });

    test('two tabs are two orders', async () => {
      const page = await open();
      const other = await page.context().newPage();
      await other.goto(url);
      await Promise.all([pay(page, 'safe'), pay(other, 'safe')]);
      await Promise.all([status(page, 'safe', 'done'), status(other, 'safe', 'done')]);
      await page.waitForSelector('.verdict[data-lane=safe]:text("2 charges for 2 orders")');
      await page.context().close();
    });

    test('it is readable on a phone, in light and dark', async () => {
      for (const [name, options] of [['phone', phone], ['dark', { ...desktop, colorScheme: 'dark' }], ['phone-dark', { ...phone, colorScheme: 'dark' }]]) {
        const page = await open(options);
        await inspect(page, `${name}-empty`);
        await page.click('[data-fault=lose-reply]');
        await charges(page, 'plain', 2);
        await page.waitForSelector('[data-fault=crash]:enabled');
        await inspect(page, name);
        await page.context().close();
      }
    });
  });
}
