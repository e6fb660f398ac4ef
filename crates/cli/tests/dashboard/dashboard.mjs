// A browser that uses every page of the dashboard, as an operator and as an attacker. The first line on the standard output is the
// port of the service behind the sidecars; the first line on the standard input has their addresses. Prints each check, and ends
// with 0 if every check held. With SCREENSHOTS, a directory, it keeps a picture of each page.

import assert from "node:assert/strict";
import fs from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import readline from "node:readline";

import { chromium } from "playwright-core";

const axe = fs.readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const deadline = 60_000;

// The service: /silent never answers, everything else does.
let effects = 0;
const service = http.createServer((request, response) => {
  request.resume().on("end", () => {
    if (request.url.startsWith("/silent")) return;
    effects += 1;
    const delay = request.url.startsWith("/slow") ? 200 : 0;
    const body = JSON.stringify({ id: `pay_${effects}`, note: "</pre><script>window.pwned = 1</script>" });
    setTimeout(() => response.writeHead(201, { "content-type": "application/json" }).end(body), delay);
  });
});
await new Promise((ready) => service.listen(0, "127.0.0.1", ready));
console.log(service.address().port);
const lines = readline.createInterface({ input: process.stdin });
const { open, guarded, messages, slow, token } = JSON.parse((await lines[Symbol.asyncIterator]().next()).value);

const check = async (name, held) => {
  await held();
  console.log(`ok ${name}`);
};

const send = (path, key, { body = "{}", caller = "Bearer anna", method = "POST", to = open.address } = {}) => {
  const headers = { "content-type": "application/json", authorization: caller };
  if (key) headers["idempotency-key"] = key;
  return fetch(`http://${to}${path}`, { method, headers, body });
};
const api = async (path) => (await fetch(`http://${open.admin}${path}`)).json();
const record = async (key) => (await (await fetch(`http://${open.admin}/v1/keys/find`, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ key }),
})).json()).records[0].record;

// The traffic of a bad day.
const hostile = "/pay%3Cscript%3Ewindow.pwned=1%3C/script%3E'\"";
for (let number = 0; number < 40; number += 1) await send("/payments", `"payment-${number}"`);
for (let number = 0; number < 25; number += 1) await send("/payments", `"payment-${number % 5}"`);
await send("/payments", '"payment-1"', { body: '{"other": 1}' });
await send("/refunds", '"payment-2"', { body: '{"other": 2}', caller: "Bearer berta" });
await send("/refunds", '"payment-2"', { body: '{"other": 3}', caller: "Bearer berta" });
await send("/payments", '""');
await send(hostile, '"hostile"');
for (let number = 0; number < 40; number += 1) await send("/payments", '"loop"', { caller: "Bearer carl" });
for (const key of ["transfer-1", "transfer-2", "transfer-3", "transfer-4"]) {
  assert.equal((await send("/silent/transfers", `"${key}"`)).status >= 500, true);
}
await fetch(`http://${open.address}/payments`);

const browser = await chromium.launch({
  executablePath: "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});

const views = {
  light: { viewport: { width: 1280, height: 900 }, colorScheme: "light" },
  dark: { viewport: { width: 1280, height: 900 }, colorScheme: "dark" },
  phone: { viewport: { width: 390, height: 844 }, colorScheme: "light", isMobile: true, hasTouch: true },
  "phone-dark": { viewport: { width: 390, height: 844 }, colorScheme: "dark", isMobile: true, hasTouch: true },
};

const filled = (page) => page.locator("[aria-busy=true]").waitFor({ state: "detached" });

/** A page of a new context, and the faults that the browser reports. */
const visit = async (options, base) => {
  const context = await browser.newContext({ ...options, baseURL: `http://${base}`, reducedMotion: "reduce" });
  context.setDefaultTimeout(deadline);
  const page = await context.newPage();
  // A page of a slow store comes before its records.
  const goto = page.goto.bind(page);
  page.goOnly = goto;
  page.goto = async (path) => {
    await goto(path);
    await filled(page);
  };
  const faults = [];
  page.on("console", (message) => {
    // The status of a refused form is no fault of the page.
    if (message.type() === "error" && !message.text().includes("the server responded with a status of 4")) faults.push(message.text());
  });
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("dialog", (dialog) => { faults.push("a dialog"); dialog.dismiss(); });
  page.on("request", (request) => {
    const url = new URL(request.url());
    if (url.host !== base && url.protocol.startsWith("http") && !page.isAttack) faults.push(`a request to ${url.host}`);
  });
  return { context, page, faults };
};

const inspect = async (page, faults, name) => {
  // Evaluated by the debugger, which the content security policy does not limit.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  const words = violations.map((one) => `${one.id}: ${one.nodes.map((node) => `${node.target} ${node.failureSummary}`).join("; ")}`);
  assert.deepEqual(words, [], name);
  const [wide, width] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
  assert.ok(wide <= width, `${name} is ${wide} wide on a screen of ${width}`);
  assert.equal(await page.evaluate(() => window.pwned), undefined, name);
  assert.deepEqual(faults, [], name);
  if (process.env.SCREENSHOTS) {
    await page.screenshot({ path: `${process.env.SCREENSHOTS}/${name}.png`, fullPage: true });
  }
};

const transfer = await record("transfer-1");
const payment = await record("payment-1");
const odd = await record("hostile");
const pages = {
  overview: "/", keys: "/keys", filtered: "/keys?state=unsettled&min_age=1s", nothing: "/keys?operation=NONE",
  wrong: "/keys?state=unknwon", stuck: "/stuck", misuse: "/misuse", routes: "/routes?request=POST%20/payments", route: "/routes/default",
  audit: "/audit", playground: "/playground", unknown: `/keys/${transfer}`, completed: `/keys/${payment}`, odd: `/keys/${odd}`,
  change: `/keys/${transfer}/respond`, missing: "/keys/ffffffff", "no-letters": "/dead-letters", "no-outbox": "/outbox",
};

// The second sidecar has its store in PostgreSQL, with messages. Their numbers are those of the statements that wrote them.
const messageApi = async (path, request) => {
  const headers = { "content-type": "application/json" };
  const post = request && { method: "POST", headers, body: JSON.stringify(request) };
  return (await fetch(`http://${messages.admin}${path}`, post)).json();
};
const sent = (await messageApi("/v1/outbox?state=all")).messages;
const refused = sent.filter((message) => message.state === "refused").map((message) => message.seq);
const messagePages = {
  letters: "/dead-letters", "letters-filtered": "/dead-letters?consumer=billing&since=2h", "letters-none": "/dead-letters?topic=none",
  "letters-wrong": "/dead-letters?since=yesterday", letter: "/dead-letters/1", "letter-plain": "/dead-letters/2",
  "letter-requeue": "/dead-letters/1/requeue", "letter-drop": "/dead-letters/1/drop", "letter-missing": "/dead-letters/999999",
  outbox: "/outbox", "outbox-all": "/outbox?state=all", "outbox-failing": "/outbox?state=failing", message: `/outbox/${refused[0]}`,
  "message-drop": `/outbox/${refused[0]}/drop`, "messages-audit": "/audit",
};
for (const [view, options] of Object.entries(views)) {
  for (const [what, base, paths] of [["page", open.admin, pages], ["page of messages", messages.admin, messagePages]]) {
    const { context, page, faults } = await visit(options, base);
    await check(`every ${what}, ${view}`, async () => {
      for (const [name, path] of Object.entries(paths)) {
        await page.goto(path);
        await inspect(page, faults, `${name}-${view}`);
      }
    });
    await context.close();
  }
}

const { context, page, faults } = await visit(views.light, open.admin);
const find = async (text) => {
  await page.getByRole("searchbox", { name: "Find a key or a record" }).fill(text);
  await page.getByRole("button", { name: "Find" }).click();
  await filled(page);
};

await check("the keyboard reaches the content", async () => {
  await page.goto("/");
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to the content");
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.id), "content");
});

await check("a key leads to its record, and stays out of the address", async () => {
  await page.goto("/");
  await find("payment-1");
  await page.waitForURL(`**/keys/${payment}`);
  assert.ok(!page.url().includes("payment-1"));
  await find("payment-2");
  await page.waitForURL("**/keys?key_tag=*");
  await filled(page);
  assert.equal(await page.locator("tbody tr").count(), 2);
  await find(payment.slice(0, 12));
  await page.waitForURL(`**/keys/${payment}`);
  await find("no-such-key");
  await page.getByRole("heading", { name: "No record has this key" }).waitFor();
  await inspect(page, faults, "not-found");
});

await check("the timeline tells what happened", async () => {
  await page.goto(`/keys/${payment}`);
  const text = await page.locator("main").innerText();
  for (const words of ["First claim", "An execution began", "The response was stored", "Replayed", "5 ×", "Sent another request"]) {
    assert.ok(text.includes(words), `${words} in ${text}`);
  }
});

await check("the response is hidden until there is a reason", async () => {
  assert.ok(!(await page.content()).includes("pay_2"));
  await page.getByLabel("Reason").fill("Ticket 12: the customer has no receipt");
  await page.getByLabel("Your name").fill("anna");
  await page.getByRole("button", { name: "Show the content" }).click();
  assert.match(await page.locator("pre.body").innerText(), /pay_2/);
  await inspect(page, faults, "revealed");
  await page.goto("/audit");
  assert.match(await page.locator("main").innerText(), /Ticket 12: the customer has no receipt/);
});

/** Fills in the form of an action, and confirms it after the preview. */
const act = async (link, fields, name, on = { page, faults }, also = async () => {}) => {
  const { page, faults } = on;
  await page.getByRole("link", { name: link }).click();
  for (const [label, text] of Object.entries(fields)) await page.getByLabel(label).fill(text);
  await also(page);
  await page.getByLabel("Reason").fill("Ticket 13");
  await page.getByLabel("Your name").fill("anna");
  await page.getByRole("button", { name: "Preview" }).click();
  assert.match(await page.locator("main").innerText(), /Nothing has changed yet/);
  await inspect(page, faults, `preview-${name}`);
  await page.getByRole("button", { name: "Confirm" }).click();
  await page.getByRole("status").waitFor();
  await inspect(page, faults, `changed-${name}`);
};

await check("an unknown outcome gets a response, which the client gets", async () => {
  await page.goto("/stuck");
  await page.locator(`a[href="/keys/${transfer}"]`).click();
  await act("It happened: give a response", { Status: "201", "Header fields": "Content-Type: application/json", Body: '{"id":"bank_7"}' }, "respond");
  const reply = await send("/silent/transfers", '"transfer-1"');
  assert.deepEqual([reply.status, await reply.text()], [201, '{"id":"bank_7"}']);
  assert.equal(reply.headers.get("idempotent-replayed"), "true");
});

await check("a resolution is taken back, amended and parked", async () => {
  await act("Block the key", {}, "park");
  assert.equal((await send("/silent/transfers", '"transfer-1"')).status, 500);
  await act("It happened: the response is lost", {}, "done");
  assert.equal((await send("/silent/transfers", '"transfer-1"')).status, 422);
  await act("It happened: give a response", { Status: "200", Body: "amended" }, "amend");
  assert.equal(await (await send("/silent/transfers", '"transfer-1"')).text(), "amended");
});

await check("what did not happen executes again", async () => {
  await page.goto(`/keys/${await record("transfer-2")}`);
  await act("It did not happen: free the key", {}, "free");
  assert.equal((await api(`/v1/keys/${await record("transfer-2")}`)).state, "released");
});

await check("a form that is out of date changes nothing", async () => {
  const id = await record("transfer-3");
  await page.goto(`/keys/${id}/free`);
  await page.getByLabel("Reason").fill("late");
  await page.getByRole("button", { name: "Preview" }).click();
  const changed = await fetch(`http://${open.admin}/v1/keys/${id}/resolve`, {
    method: "POST", headers: { "content-type": "application/json" },
    body: JSON.stringify({ outcome: "completed", tombstone: true, reason: "first" }),
  });
  assert.equal(changed.status, 200);
  await page.getByRole("button", { name: "Confirm" }).click();
  assert.match(await page.locator("main").innerText(), /has changed since you opened the form/);
  assert.equal((await api(`/v1/keys/${id}`)).state, "tombstone");
  await inspect(page, faults, "out-of-date");
});

await check("the audit trail has it all", async () => {
  await page.goto("/audit");
  assert.equal(await page.locator("table").first().locator("tbody tr").count(), 6);
  await inspect(page, faults, "audit-full");
});

await check("the overview follows the traffic without a reload", async () => {
  await page.goto("/");
  await page.evaluate(() => { window.stays = true; });
  const total = page.locator(".cardhead .total b");
  const before = await total.innerText();
  await page.getByText("By minute, as a table").click();
  await send("/payments", '"later"');
  await page.waitForFunction((before) => document.querySelector(".cardhead .total b").textContent !== before, before, { timeout: deadline });
  assert.equal(await page.evaluate(() => window.stays), true);
  assert.equal(await page.locator("details").getAttribute("open"), "", "an open table stays open");
  await inspect(page, faults, "overview-later");
  await page.getByRole("link", { name: "Pause" }).click();
  assert.equal(await page.locator("[hx-trigger]").count(), 0);
});

await check("the playground shows what happens to retries", async () => {
  for (const [label, words, times] of [
    ["Send it twice at once", "One request executed", 1],
    ["Cut the reply, then retry", "the service executed once", 1],
    ["Send it, then another body with the same key", "The second request was refused", 1],
    ["Send it twice", "One request executed", 1],
    ["Send it once", "Send it again", 1],
  ]) {
    await page.goto("/playground");
    const before = effects;
    await page.getByLabel("Path").fill("/slow");
    await page.getByLabel(label, { exact: true }).check();
    await page.getByRole("button", { name: "Send" }).click();
    await page.getByRole("heading", { name: "Result" }).waitFor();
    assert.match(await page.getByRole("status").innerText(), new RegExp(words), label);
    assert.equal(effects - before, times, label);
    await inspect(page, faults, `playground-${label.toLowerCase().replace(/[^a-z]+/g, "-")}`);
  }
});

await check("everything but updates works without JavaScript", async () => {
  const { context, page } = await visit({ ...views.light, javaScriptEnabled: false }, open.admin);
  await page.goto("/keys");
  await page.getByLabel("State", { exact: true }).selectOption("unsettled");
  await page.getByRole("button", { name: "Filter" }).click();
  await filled(page);
  assert.equal(await page.locator("tbody tr").count(), 1);
  await page.locator("tbody a.id").first().click();
  await page.getByRole("link", { name: "It happened: the response is lost" }).click();
  await page.getByLabel("Reason").fill("no script");
  await page.getByRole("button", { name: "Preview" }).click();
  await page.getByRole("button", { name: "Confirm" }).click();
  assert.match(await page.locator("main").innerText(), /no script/);
  await page.goto("/stuck");
  assert.match(await page.locator("main").innerText(), /Nothing is stuck/);
  await context.close();
});
await page.goto("/stuck");
await check("an empty page explains itself", () => inspect(page, faults, "stuck-empty"));

await check("a page of another site can change nothing and show nothing", async () => {
  const { context, page } = await visit(views.light, open.admin);
  page.isAttack = true;
  const id = await record("payment-3");
  const text = await (await fetch(`http://${open.admin}/keys/${payment}`)).text();
  const formToken = /name="form_token" value="([0-9a-f]+)"/.exec(text)[1];
  // The worst case: the attacker has seen a token.
  const form = `<form id=f method=post action="http://${open.admin}/keys/${id}/response">
    <input name=form_token value="${formToken}"><input name=reason value=x></form>
    <iframe src="http://${open.admin}/"></iframe>`;
  const attacker = http.createServer((request, response) => response.writeHead(200, { "content-type": "text/html" }).end(form));
  await new Promise((ready) => attacker.listen(0, "127.0.0.1", ready));
  for (const host of ["127.0.0.1", "localhost"]) {
    await page.goto(`http://${host}:${attacker.address().port}/`);
    await page.waitForFunction(() => document.querySelector("iframe") !== null);
    const frame = page.frames().find((frame) => frame !== page.mainFrame());
    await frame.waitForLoadState();
    assert.ok(!(await frame.content()).includes("form_token"), "the frame is empty");
    await page.evaluate(() => document.getElementById("f").submit());
    await page.waitForURL(`http://${open.admin}/**`);
    assert.match(await page.locator("main").innerText(), /may come from a page of another site/);
  }
  attacker.close();
  await context.close();
});

// The third sidecar has a store whose surveys take their time. A page is there before its records.
for (const number of [1, 2, 3]) await send("/payments", `"slow-${number}"`, { to: slow.address });

/** Holds the requests with which a page fills itself in, until the function is called that it returns. */
const hold = async (page) => {
  let release;
  const released = new Promise((resolve) => { release = resolve; });
  await page.route(/asked=/, async (route) => {
    if (route.request().headers()["hx-request"]) await released;
    await route.continue();
  });
  return release;
};

await check("a page comes before its records, and fills itself in", async () => {
  const { context, page, faults } = await visit(views.light, slow.admin);
  const busy = page.locator("[aria-busy=true]");
  for (const [path, words] of [["/stuck", /Nothing is stuck/], ["/routes", /completed 3/], ["/keys", /3 in all/]]) {
    const release = await hold(page);
    await page.goOnly(path);
    await busy.waitFor();
    await inspect(page, faults, `waits${path.replace("/", "-")}`);
    assert.match(await page.getByRole("status").textContent(), /being counted/);
    await page.evaluate(() => { window.stays = true; });
    release();
    await filled(page);
    await page.getByText(words).first().waitFor();
    assert.equal(await page.getByRole("status").textContent(), "The result is shown.", "it is announced");
    assert.equal(await page.evaluate(() => window.stays), true);
    await inspect(page, faults, `filled${path.replace("/", "-")}`);
  }
  await page.setViewportSize({ width: 1280, height: 300 });
  const release = await hold(page);
  await page.goOnly("/keys?state=completed");
  await busy.waitFor();
  await page.getByLabel("Operation begins with").focus();
  await page.keyboard.type("POST /refunds");
  const top = await page.evaluate(() => window.scrollY);
  release();
  await filled(page);
  await page.getByText("3 in all").waitFor();
  const stays = await page.evaluate(() => [document.activeElement.id, document.activeElement.value, window.scrollY]);
  assert.deepEqual(stays, ["operation", "POST /refunds", top], "focus and place stay");
  await context.close();
});

await check("a failure ends the wait for the records, and the page goes on when the store does", async () => {
  const { context, page } = await visit(views.light, slow.admin);
  const release = await hold(page);
  await page.goOnly("/keys?operation=FAIL");
  await page.locator("[aria-busy=true]").waitFor();
  release();
  await page.getByRole("alert").waitFor();
  assert.match(await page.getByRole("alert").innerText(), /statement timeout/);
  assert.equal(await page.locator("[aria-busy=true]").count(), 0, "it does not wait any more");
  assert.match(await page.locator("#progress").textContent(), /out of reach/, "and says so");
  // The store works again.
  await page.route("**/keys?operation=FAIL", (route) => route.continue({ url: route.request().url().replace("FAIL", "PO") }));
  await page.getByText("3 in all").waitFor({ timeout: 60_000 });
  assert.equal(await page.getByRole("alert").count(), 0);
  assert.ok(await page.getByRole("button", { name: "Filter" }).isVisible(), "the whole page is there");
  await context.close();
});

await check("a search that takes its time leads to the record", async () => {
  const { context, page, faults } = await visit(views.light, slow.admin);
  const search = async (text) => {
    await page.getByRole("searchbox", { name: "Find a key or a record" }).fill(text);
    await page.getByRole("button", { name: "Find" }).click();
    await page.locator("[aria-busy=true]").waitFor();
    assert.ok(!page.url().includes("slow"), page.url());
  };
  await page.goOnly("/audit");
  const release = await hold(page);
  await search("slow-2");
  await inspect(page, faults, "searching");
  release();
  await page.getByRole("heading", { name: "Timeline" }).waitFor();
  assert.match(page.url(), /\/keys\/[0-9a-f]{64}$/);
  const later = await hold(page);
  await search("slow-none");
  later();
  await page.getByRole("heading", { name: "No record has this key" }).waitFor();
  await context.close();
});

await check("pages fill themselves in without JavaScript", async () => {
  const { context, page } = await visit({ ...views.light, javaScriptEnabled: false }, slow.admin);
  await page.goOnly("/keys?operation=POST");
  await page.getByText("3 in all").waitFor();
  assert.match(page.url(), /asked=/, "it was loaded again");
  await page.getByRole("searchbox", { name: "Find a key or a record" }).fill("slow-3");
  await page.getByRole("button", { name: "Find" }).click();
  await page.getByRole("heading", { name: "Timeline" }).waitFor();
  await context.close();
});

await check("with a token, a login opens the pages, and a logout closes them", async () => {
  const { context, page, faults } = await visit(views.light, guarded.admin);
  await page.goto("/keys?state=unknown");
  await inspect(page, faults, "login");
  assert.match(page.url(), /\/login\?next=/);
  await page.getByLabel("Admin token").fill("wrong-wrong-wrong");
  await page.getByLabel("Your name").fill("anna");
  await page.getByRole("button", { name: "Log in" }).click();
  assert.match(await page.getByRole("alert").innerText(), /The token is wrong/);
  await inspect(page, faults, "login-wrong");
  await page.getByLabel("Admin token").fill(token);
  await page.getByRole("button", { name: "Log in" }).click();
  await page.waitForURL("**/keys?state=unknown");
  await inspect(page, faults, "logged-in");
  const [cookie, ...others] = await context.cookies();
  assert.deepEqual(others, []);
  assert.deepEqual([cookie.httpOnly, cookie.sameSite, cookie.value.includes(token)], [true, "Strict", false]);
  assert.equal(await page.evaluate(() => document.cookie), "");
  await page.getByRole("button", { name: "Log out" }).click();
  await page.waitForURL("**/login");
  assert.deepEqual(await context.cookies(), []);
  await context.addCookies([cookie]);
  await page.goto("/");
  assert.match(page.url(), /\/login/, "the session is over, also with its cookie");
  await context.close();
});

const letters = async (query = "") => (await messageApi(`/v1/dead-letters${query}`)).dead_letters.map((letter) => letter.number);
const mailbox = await visit(views.light, messages.admin);
const rows = async () => {
  await filled(mailbox.page);
  return mailbox.page.locator("table").first().locator("tbody tr").count();
};
const main = async () => {
  await filled(mailbox.page);
  return mailbox.page.locator("main").innerText();
};

await check("dead letters are listed by page, consumer, topic and age", async () => {
  await mailbox.page.goto("/dead-letters");
  assert.equal(await rows(), 50);
  await mailbox.page.getByRole("link", { name: "Older" }).click();
  assert.equal(await rows(), 14);
  await mailbox.page.getByRole("link", { name: "Newest" }).click();
  await mailbox.page.getByRole("link", { name: /of billing from orders with the reason attempts-exhausted/ }).click();
  assert.equal(await rows(), 1);
  await mailbox.page.goto("/dead-letters");
  await mailbox.page.getByLabel("Topic").fill("mails");
  await mailbox.page.getByLabel("Given up before").fill("2h");
  await mailbox.page.getByRole("button", { name: "Filter" }).click();
  assert.equal(await rows(), 1, "one letter of this topic is older");
  await mailbox.page.getByLabel("Given up before").fill("soon");
  await mailbox.page.getByRole("button", { name: "Filter" }).click();
  assert.match(await mailbox.page.getByRole("alert").innerText(), /until: "soon" is not a time/);
  assert.equal(await mailbox.page.getByLabel("Topic").inputValue(), "mails", "what was entered stays");
});

await check("a payload is hidden until there is a reason, and stays a text", async () => {
  await mailbox.page.goto("/dead-letters/1");
  const before = await mailbox.page.content();
  for (const secret of ["card 4929", "evt-1"]) assert.ok(!before.includes(secret), secret);
  await mailbox.page.getByLabel("Reason").fill("Ticket 20: whose order is it?");
  await mailbox.page.getByLabel("Your name").fill("anna");
  await mailbox.page.getByRole("button", { name: "Show the content" }).click();
  assert.match(await mailbox.page.locator("pre.body").innerText(), /card 4929.*<script>/);
  assert.match(await main(), /evt-1/);
  assert.match(await main(), /\\u\{202e\}/, "marks of direction are shown escaped");
  await inspect(mailbox.page, mailbox.faults, "letter-revealed");
  await mailbox.page.goto("/audit");
  assert.match(await main(), /Ticket 20: whose order is it\?\s+dead letter 1/);
});

await check("a dead letter is published again after its obstacles were checked", async () => {
  await mailbox.page.goto("/dead-letters/3");
  await mailbox.page.getByRole("link", { name: "Publish it again" }).click();
  await mailbox.page.getByLabel("Reason").fill("Ticket 21");
  await mailbox.page.getByRole("button", { name: "Preview" }).click();
  assert.match(await mailbox.page.getByRole("alert").innerText(), /tick each box/);
  await mailbox.page.getByLabel("Window for duplicates of the broker").fill("7d");
  await mailbox.page.getByLabel(/outcome-unknown/).check();
  await mailbox.page.getByRole("button", { name: "Preview" }).click();
  assert.match(await mailbox.page.getByRole("alert").innerText(), /may be lost. Wait, or correct the window/);
  await inspect(mailbox.page, mailbox.faults, "letter-too-recent");
  await mailbox.page.goto("/dead-letters/3");
  assert.ok((await letters("?consumer=billing")).includes(3));
  const tick = (page) => page.getByLabel(/outcome-unknown/).check();
  await act("Publish it again", { "Window for duplicates of the broker": "0s" }, "letter-requeue", mailbox, tick);
  assert.match(await mailbox.page.getByRole("status").innerText(), /Dead letter 3 is in the outbox now/);
  assert.ok(!(await letters("?consumer=billing")).includes(3));
  assert.equal((await messageApi("/v1/outbox?state=all")).messages.length, sent.length + 1);
});

await check("a dead letter is deleted with the keyboard alone", async () => {
  await mailbox.page.goto("/dead-letters/2");
  await mailbox.page.getByRole("link", { name: "Delete it" }).focus();
  await mailbox.page.keyboard.press("Enter");
  await mailbox.page.waitForURL("**/drop");
  const at = () => mailbox.page.evaluate(() => document.activeElement.id || document.activeElement.value || document.activeElement.textContent);
  const tabTo = async (wanted) => {
    for (let steps = 0; (await at()) !== wanted; steps += 1) {
      assert.ok(steps < 40, `${wanted} is out of reach`);
      await mailbox.page.keyboard.press("Tab");
    }
  };
  await tabTo("reason");
  await mailbox.page.keyboard.type("Ticket 22: test data");
  await tabTo("preview");
  await mailbox.page.keyboard.press("Enter");
  await mailbox.page.getByRole("heading", { name: "Nothing has changed yet" }).waitFor();
  assert.ok((await letters("?consumer=billing")).includes(2));
  await inspect(mailbox.page, mailbox.faults, "preview-drop");
  await tabTo("confirm");
  await mailbox.page.keyboard.press("Enter");
  await mailbox.page.getByRole("status").waitFor();
  assert.match(await main(), /Dead letter 2 was deleted/);
  assert.ok(!(await letters("?consumer=billing")).includes(2));
});

await check("refused messages of the outbox are published again and deleted", async () => {
  await mailbox.page.goto("/outbox");
  assert.equal(await rows(), 2);
  await mailbox.page.getByRole("link", { name: `Message ${refused[0]} of the outbox` }).click();
  assert.match(await main(), /wait behind it/);
  await act("Publish it again", {}, "outbox-requeue", mailbox);
  assert.match(await main(), /is published again as soon as a relay runs/);
  assert.equal((await messageApi(`/v1/outbox/${refused[0]}`)).state, "failing");
  await mailbox.page.goto(`/outbox/${refused[0]}`);
  assert.equal(await mailbox.page.getByRole("link", { name: "Delete it" }).count(), 0, "a relay tries it again");
  await mailbox.page.goto(`/outbox/${refused[1]}`);
  await act("Delete it", {}, "outbox-drop", mailbox);
  assert.equal((await messageApi(`/v1/outbox/${refused[1]}`)).status, 404);
  await mailbox.page.goto("/audit");
  for (const words of ["Ticket 22: test data", "Ticket 13"]) assert.ok((await main()).includes(words), words);
  await inspect(mailbox.page, mailbox.faults, "messages-audit-full");
});

await check("a form about a message that is gone changes nothing", async () => {
  await mailbox.page.goto("/dead-letters/4/drop");
  await mailbox.page.getByLabel("Reason").fill("late");
  await mailbox.page.getByRole("button", { name: "Preview" }).click();
  await messageApi("/v1/dead-letters/4/drop", { reason: "first" });
  await mailbox.page.getByRole("button", { name: "Confirm" }).click();
  assert.match(await main(), /There is no dead letter 4.*Look at the list again/s);
  await inspect(mailbox.page, mailbox.faults, "message-gone");
});

await check("messages are changed without JavaScript, and by no page of another site", async () => {
  const { context, page } = await visit({ ...views.light, javaScriptEnabled: false }, messages.admin);
  await page.goto("/dead-letters/5");
  await page.getByRole("link", { name: "Delete it" }).click();
  await page.getByLabel("Reason").fill("no script");
  await page.getByRole("button", { name: "Preview" }).click();
  await page.getByRole("button", { name: "Confirm" }).click();
  assert.match(await page.locator("main").innerText(), /Dead letter 5 was deleted/);
  await page.goto("/dead-letters/6/drop");
  const [formToken, seen] = await Promise.all(["form_token", "seen"].map((name) => page.locator(`main input[name=${name}]`).inputValue()));
  for (const [origin, token, status] of [["http://evil.example", formToken, 403], [`http://${messages.admin}`, "0".repeat(64), 403]]) {
    for (const path of ["/dead-letters/6/drop", "/dead-letters/6/payload"]) {
      const body = new URLSearchParams({ form_token: token, seen, step: "confirm", reason: "attack" });
      assert.equal((await fetch(`http://${messages.admin}${path}`, { method: "POST", headers: { origin }, body })).status, status);
    }
  }
  await fetch(`http://${messages.admin}/dead-letters/6/drop?step=confirm&reason=x&seen=${seen}`);
  assert.ok((await letters("?limit=1000")).includes(6));
  await context.close();
});
assert.deepEqual(mailbox.faults, []);
await mailbox.context.close();

assert.deepEqual(faults, []);
await context.close();
await browser.close();
service.closeAllConnections();
service.close();
lines.close();
