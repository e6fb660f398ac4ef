// A service on Express with this library, for the table of cases of the repository. Lines of JSON on the standard input open and
// close listeners, and {"closed": true} says that nothing more is sent to the store of one. The end of the input ends the process, and SIGTERM ends it after the requests that it has begun.
import { once } from 'node:events';
import { createServer } from 'node:http';
import { createInterface } from 'node:readline';
import expressFramework from 'express';
import { Redis } from 'ioredis';
import pg from 'pg';
import { attemptOf, express, Keyring, MemoryStore, Oncegate, optionsFromNames, PostgresStore, RedisStore, SealedStore, UnknownSettingError } from '../dist/esm/index.js';

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
const open = new Map();

/** The parts of the response that the case gives to this execution: its head, parts of its body, trailers, and its end. */
async function* ask(backend, execution) {
  const response = await fetch(`http://${backend}/parts`, { method: 'POST', body: JSON.stringify(execution) });
  const decoder = new TextDecoder();
  let text = '';
  for await (const bytes of response.body) {
    text += decoder.decode(bytes, { stream: true });
    for (let end = text.indexOf('\n'); end >= 0; end = text.indexOf('\n')) {
      yield JSON.parse(text.slice(0, end));
      text = text.slice(end + 1);
    }
  }
}

function openStore(url) {
  if (url === 'memory:') return { store: new MemoryStore(), close: () => undefined };
  if (url.startsWith('postgres')) {
    const pool = new pg.Pool({ connectionString: url, max: 10, connectionTimeoutMillis: 15_000 });
    pool.on('error', () => undefined);
    return { store: new PostgresStore(pool), close: () => pool.end() };
  }
  const client = new Redis(url, { maxRetriesPerRequest: 1, enableOfflineQueue: true });
  client.on('error', () => undefined);
  return { store: new RedisStore(client), close: () => client.disconnect() };
}

/** Settings of the process, and not of a route. */
const SHARED = { 'max-in-flight': 'maxInFlight', 'max-in-flight-per-caller': 'maxInFlightPerCaller', 'store-timeout': 'storeTimeout', 'request-budget': 'requestBudget', 'response-budget': 'responseBudget', service: 'service' };

/** Answers each request with what the case says. */
function handler(backend, number) {
  return async (req, res) => {
    const parts = [];
    for await (const part of req) parts.push(part);
    const { rawHeaders: raw } = req;
    const fields = raw.flatMap((name, i) => (i % 2 ? [] : [[name, raw[i + 1]]]));
    const attempt = attemptOf(req);
    if (attempt !== undefined) {
      fields.push(['oncegate-record', attempt.record], ['oncegate-token', `${attempt.token}`], ['oncegate-attempt', `${attempt.number}`]);
    }
    const execution = { case: number, method: req.method, target: req.originalUrl, fields, body: Buffer.concat(parts).toString('hex') };
    const response = ask(backend, execution);
    const { value: head } = await response.next();
    if (head === undefined || head.aborts) {
      res.destroy();
      return;
    }
    res.status(head.status);
    for (const [name, value] of head.fields) res.appendHeader(name, value);
    if (head.length !== null && head.length < 1024 * 1024) {
      const body = [];
      for await (const { data } of response) if (data !== undefined) body.push(Buffer.from(data, 'hex'));
      if (req.method === 'HEAD') res.setHeader('content-length', head.length);
      if (body.length === 0) res.end();
      else res.end(Buffer.concat(body));
      return;
    }
    try {
      for await (const { data, trailers, breaks, end } of response) {
        if (data !== undefined && !res.write(Buffer.from(data, 'hex'))) await once(res, 'drain');
        if (trailers !== undefined) res.addTrailers(trailers);
        if (breaks) res.destroy();
        if (end) res.end();
      }
    } catch (error) {
      res.destroy(error);
    }
  };
}

async function start({ settings, store: url, backend, case: number, 'seal-keys': keys }) {
  const shared = {};
  const named = {};
  for (const [name, value] of Object.entries(settings)) {
    if (name in SHARED) shared[SHARED[name]] = value;
    else named[name] = value;
  }
  const options = optionsFromNames(named);
  const { store: clear, close } = openStore(url);
  const store = keys ? new SealedStore(clear, Keyring.parse(keys)) : clear;
  const oncegate = new Oncegate({ service: 'cases', store, ...shared });
  const app = expressFramework();
  app.disable('x-powered-by');
  app.disable('etag');
  app.use(express(oncegate, options));
  app.use(handler(backend, number));
  // Without the stack trace that Express prints.
  app.use((error, req, res, next) => (res.headersSent ? res.destroy() : res.status(500).json({ error: 'failed' })));
  const server = createServer({ maxHeaderSize: 256 * 1024 }, app);
  server.listen({ port: 0, host: '127.0.0.1', backlog: 4096 });
  await once(server, 'listening');
  const address = `127.0.0.1:${server.address().port}`;
  const end = () => {
    // A pool is closed when its last connection is given back, but opens no other one.
    void close();
    server.closeAllConnections();
    server.close();
  };
  const drain = async () => {
    const closed = new Promise((resolve) => server.close(resolve));
    await oncegate.drain();
    await closed;
    await close();
  };
  open.set(address, { end, drain });
  say({ address });
}

process.on('SIGTERM', async () => {
  await Promise.all([...open.values()].map(({ drain }) => drain()));
  process.exit(0);
});

const kebab = (name) => name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);

for await (const line of createInterface({ input: process.stdin })) {
  if (line.trim() === '') continue;
  const command = JSON.parse(line);
  if (command.close !== undefined) {
    open.get(command.close)?.end();
    open.delete(command.close);
    say({ closed: true });
    continue;
  }
  try {
    await start(command);
  } catch (error) {
    if (error instanceof UnknownSettingError) say({ unsupported: kebab(error.setting) });
    else if (error.name === 'SettingsError') say({ unsupported: kebab(error.message.split(':')[0]) });
    else throw error;
  }
}
process.exit(0);
