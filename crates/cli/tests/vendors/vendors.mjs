// The client libraries of Stripe, Square, Adyen and PayPal, unchanged, against a sidecar with the profile of their API and a small
// service behind it. The first line on the standard output is the port of the service; the first line on the standard input has
// the address of a sidecar for each profile. Ends with 0 if every check held, and prints each check.

import assert from "node:assert/strict";
import dns from "node:dns";
import http from "node:http";
import https from "node:https";
import net from "node:net";
import readline from "node:readline";

import adyenLibrary from "@adyen/api-library";
import * as paypalLibrary from "@paypal/paypal-server-sdk";
import square from "square";
import Stripe from "stripe";

// No name is looked up: every name is this machine. So a library that ignores the address of the sidecar reaches nothing.
const here = { address: "127.0.0.1", family: 4 };
dns.lookup = (name, options, done = options) => {
  const reply = options.all ? [[here]] : [here.address, here.family];
  process.nextTick(() => done(null, ...reply));
};

// The service: it counts effects, waits while it is held, and fails if it is told to.
const service = { effects: 0, status: 200, holds: [], body: () => ({}) };
const server = http.createServer((request, response) => {
  const parts = [];
  request.on("data", (part) => parts.push(part));
  request.on("end", async () => {
    if (request.url === "/v1/oauth2/token") {
      response.writeHead(200, { "content-type": "application/json" });
      response.end(JSON.stringify({ access_token: "t", token_type: "Bearer", expires_in: 3600 }));
      return;
    }
    service.effects += 1;
    const number = service.effects;
    const status = service.status;
    await service.hold;
    const text = JSON.stringify(status < 400 ? service.body(number, parts) : service.error);
    response.writeHead(status, { "content-type": "application/json", "request-id": `req_${number}` });
    response.end(text);
  });
});
await new Promise((listens) => server.listen(0, "127.0.0.1", listens));
console.log(server.address().port);

const lines = readline.createInterface({ input: process.stdin });
const sidecars = JSON.parse((await lines[Symbol.asyncIterator]().next()).value);

// A line to a sidecar. It cuts the connection when the first byte of a response comes after the next effect. It counts the parts
// of responses, and the connections that have ended.
function line(address) {
  const [host, port] = address.split(":");
  const state = { cutsAfter: undefined, parts: 0, ended: 0 };
  const proxy = net.createServer((client) => {
    const upstream = net.connect(Number(port), host);
    client.on("error", () => upstream.destroy());
    upstream.on("error", () => client.destroy());
    client.on("close", () => {
      state.ended += 1;
      upstream.destroy();
    });
    client.on("data", (bytes) => upstream.write(bytes));
    upstream.on("data", (bytes) => {
      state.parts += 1;
      if (state.cutsAfter < service.effects) {
        state.cutsAfter = undefined;
        client.destroy();
        return;
      }
      client.write(bytes);
    });
    upstream.on("end", () => client.end());
  });
  return new Promise((listens) => {
    proxy.listen(0, "127.0.0.1", () => listens({ state, port: proxy.address().port, close: () => proxy.close() }));
  });
}

const failed = (promise) => promise.then((value) => assert.fail(`no error, but ${JSON.stringify(value)}`), (error) => error);

// The checks that are the same for all libraries.
async function speaks(name, vendor) {
  const check = async (what, run) => {
    service.status = 200;
    service.hold = undefined;
    const before = service.effects;
    await run(before);
    console.log(`${name}: ${what}`);
  };
  const effects = (before) => service.effects - before;

  await check("a lost reply is retried, and charged once", async (before) => {
    vendor.line.state.cutsAfter = before;
    const first = await vendor.persistent(`${name}-lost`, 100);
    assert.deepEqual([effects(before), vendor.line.state.cutsAfter], [1, undefined]);
    assert.equal(await vendor.persistent(`${name}-lost`, 100), first);
    assert.equal(effects(before), 1);
  });

  await check("a duplicate of a running request is refused as running", async (before) => {
    let open;
    service.hold = new Promise((opens) => (open = opens));
    const first = vendor.pay(`${name}-double`, 100);
    while (effects(before) === 0) await new Promise((later) => setTimeout(later, 5));
    const error = await failed(vendor.pay(`${name}-double`, 100));
    vendor.isRunning(error);
    open();
    const id = await first;
    assert.equal(await vendor.pay(`${name}-double`, 100), id);
    assert.equal(effects(before), 1);
  });

  if (vendor.answered) {
    await check("a library that repeats a duplicate by itself gets the response of the first one", async (before) => {
      let open;
      service.hold = new Promise((opens) => (open = opens));
      const first = vendor.pay(`${name}-repeated`, 100);
      while (effects(before) === 0) await new Promise((later) => setTimeout(later, 5));
      const answered = vendor.answered();
      const second = vendor.persistent(`${name}-repeated`, 100);
      while (vendor.answered() === answered) await new Promise((later) => setTimeout(later, 5));
      open();
      assert.equal(await second, await first);
      assert.equal(effects(before), 1);
    });
  }

  await check("a key of another request is refused as such", async (before) => {
    await vendor.pay(`${name}-reused`, 100);
    vendor.isReused(await failed(vendor.pay(`${name}-reused`, 200)));
    assert.equal(effects(before), 1);
  });

  await check("a server error is kept, and the library comes to an end", async (before) => {
    service.status = 500;
    vendor.isServerError(await failed(vendor.persistent(`${name}-error`, 100)));
    service.status = 200;
    vendor.isServerError(await failed(vendor.pay(`${name}-error`, 100)));
    assert.equal(effects(before), 1);
  });
}

async function stripe(address) {
  const own = await line(address);
  service.body = (number) => ({ id: `ch_${number}`, object: "charge", amount: 100 });
  service.error = { error: { type: "api_error", message: "it failed" } };
  const client = (maxNetworkRetries) =>
    new Stripe("sk_test_1", { host: "127.0.0.1", port: own.port, protocol: "http", maxNetworkRetries, telemetry: false });
  const [once, persistent] = [client(0), client(3)];
  const charge = (of) => async (key, amount) => {
    const charged = await of.charges.create({ amount, currency: "eur", source: "tok_visa" }, { idempotencyKey: key });
    return charged.id;
  };
  await speaks("stripe", {
    line: own,
    pay: charge(once),
    persistent: charge(persistent),
    answered: () => own.state.parts,
    isRunning: (error) => assert.deepEqual([error.statusCode, error.code], [409, "idempotency_key_in_use"]),
    isReused: (error) => assert.deepEqual([error.type, error.statusCode], ["StripeIdempotencyError", 400]),
    isServerError: (error) => assert.deepEqual([error.type, error.statusCode], ["StripeAPIError", 500]),
  });
  // The library makes a key if its caller has none.
  const before = service.effects;
  own.state.cutsAfter = before;
  await persistent.charges.create({ amount: 100, currency: "eur", source: "tok_visa" });
  assert.deepEqual([service.effects, own.state.cutsAfter], [before + 1, undefined]);
  console.log("stripe: a request under a key of the library is repeated, and charged once");
  // Without `Stripe-Should-Retry: false` on a kept server error, the library would ask three times more.
  service.status = 500;
  let retries = 0;
  persistent.on("request", () => (retries += 1));
  await failed(charge(persistent)("stripe-ends", 100));
  assert.equal(retries, 1);
  service.status = 200;
  const replayed = await once.charges.create(
    { amount: 100, currency: "eur", source: "tok_visa" },
    { idempotencyKey: "stripe-double" },
  );
  assert.equal(replayed.lastResponse.headers["idempotent-replayed"], "true");
  assert.equal(replayed.lastResponse.headers["original-request"], `req_${replayed.id.slice(3)}`);
  console.log("stripe: a replay names the request that it repeats");
  own.close();
}

async function squares(address) {
  const own = await line(address);
  service.body = (number) => ({ payment: { id: `p_${number}`, status: "COMPLETED" } });
  service.error = { errors: [{ category: "API_ERROR", code: "INTERNAL_SERVER_ERROR" }] };
  const client = new square.SquareClient({ token: "t", environment: `http://127.0.0.1:${own.port}` });
  const pay = (maxRetries) => async (key, amount) => {
    const money = { amount: BigInt(amount), currency: "EUR" };
    const paid = await client.payments.create({ idempotencyKey: key, sourceId: "cnon", amountMoney: money }, { maxRetries });
    return paid.payment.id;
  };
  await speaks("square", {
    line: own,
    pay: pay(0),
    // The library repeats nothing after a lost connection: its caller does.
    persistent: (key, amount) =>
      pay(0)(key, amount).catch((error) => (error.statusCode ? Promise.reject(error) : pay(0)(key, amount))),
    isRunning: (error) => assert.deepEqual([error.statusCode, error.errors[0].code], [409, "CONFLICT"]),
    isReused: (error) => assert.deepEqual([error.statusCode, error.errors[0].code], [400, "IDEMPOTENCY_KEY_REUSED"]),
    isServerError: (error) => assert.deepEqual([error.statusCode, error.errors[0].category], [500, "API_ERROR"]),
  });
  own.close();
}

async function adyen(address) {
  const own = await line(address);
  service.body = (number) => ({ pspReference: `psp-${number}`, resultCode: "Authorised" });
  service.error = { status: 500, errorCode: "900", message: "it failed", errorType: "internal" };
  const client = new adyenLibrary.Client({ apiKey: "k", environment: "TEST" });
  const { PaymentsApi } = new adyenLibrary.CheckoutAPI(client);
  PaymentsApi.baseUrl = `https://localhost:${own.port}/v71`;
  const pay = async (key, amount) => {
    const payment = {
      amount: { currency: "EUR", value: amount },
      merchantAccount: "m",
      paymentMethod: { type: "scheme" },
      reference: "r",
      returnUrl: "https://shop.example",
    };
    return (await PaymentsApi.payments(payment, { idempotencyKey: key })).pspReference;
  };
  await speaks("adyen", {
    line: own,
    pay,
    // The library repeats nothing, and reports a lost connection as an error without a response.
    persistent: (key, amount) =>
      pay(key, amount).catch((error) => (error.responseHeaders ? Promise.reject(error) : pay(key, amount))),
    isRunning: (error) => {
      assert.deepEqual([error.statusCode, error.errorCode], [422, "704"]);
      assert.equal(error.responseHeaders["transient-error"], "true");
    },
    isReused: (error) => {
      assert.deepEqual([error.statusCode, error.errorCode], [422, "702"]);
      assert.equal(error.responseHeaders["transient-error"], "false");
    },
    isServerError: (error) => assert.equal(error.statusCode, 500),
  });
  own.close();
}

async function paypal(address) {
  const own = await line(address);
  service.body = (number) => ({ id: `order-${number}`, status: "CREATED" });
  service.error = { name: "INTERNAL_SERVER_ERROR", message: "it failed", debug_id: "d" };
  // The addresses of the library are fixed. Its option for an agent leads connections, and only these, to the sidecar: the
  // certificate is still checked for the name of the API.
  class ToSidecar extends https.Agent {
    createConnection(options, done) {
      return super.createConnection({ ...options, host: here.address, port: own.port }, done);
    }
  }
  const client = (retryConfig) =>
    new paypalLibrary.Client({
      clientCredentialsAuthCredentials: { oAuthClientId: "id", oAuthClientSecret: "secret" },
      environment: paypalLibrary.Environment.Sandbox,
      httpClientOptions: { httpsAgent: new ToSidecar(), retryConfig },
    });
  const once = client({ maxNumberOfRetries: 0 });
  // The library repeats a POST only if its caller asks for it.
  const persistent = client({
    maxNumberOfRetries: 3,
    httpMethodsToRetry: ["POST"],
    maximumRetryWaitTime: 20,
    retryInterval: 0.01,
  });
  const statuses = [];
  const create = (of) => async (key, amount) => {
    const order = {
      intent: paypalLibrary.CheckoutPaymentIntent.Capture,
      purchaseUnits: [{ amount: { currencyCode: "EUR", value: `${amount}.00` } }],
    };
    const created = await new paypalLibrary.OrdersController(of).createOrder({ body: order, paypalRequestId: key });
    statuses.push(created.statusCode);
    return created.result.id;
  };
  const isError = (error, status, name, issue) => {
    assert.ok(error instanceof paypalLibrary.CustomError, String(error));
    // The library reads the bodies of 400, 401 and 422 only.
    const result = error.result ?? JSON.parse(error.body);
    assert.deepEqual([error.statusCode, result.name, result.details?.[0].issue], [status, name, issue]);
  };
  await speaks("paypal", {
    line: own,
    pay: create(once),
    persistent: create(persistent),
    // The connection of each request ends with its response; the parts of TLS are no responses.
    answered: () => own.state.ended,
    isRunning: (error) => isError(error, 409, "RESOURCE_CONFLICT", "PREVIOUS_REQUEST_IN_PROGRESS"),
    isReused: (error) => isError(error, 422, "UNPROCESSABLE_ENTITY", "PAYPAL_REQUEST_ID_PREVIOUSLY_USED"),
    isServerError: (error) => isError(error, 500, "INTERNAL_SERVER_ERROR", undefined),
  });
  service.status = 201;
  statuses.length = 0;
  const id = await create(once)("paypal-created", 100);
  assert.equal(await create(once)("paypal-created", 100), id);
  assert.deepEqual(statuses, [201, 200]);
  console.log("paypal: a replay of a created order has 200 instead of 201");
  own.close();
}

await stripe(sidecars.stripe);
await squares(sidecars.square);
await adyen(sidecars.adyen);
await paypal(sidecars.paypal);
process.exit(0);
