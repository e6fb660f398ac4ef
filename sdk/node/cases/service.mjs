// A service on Express with this library, for the table of cases of the repository. Lines of JSON on the standard input open and
// close listeners; the end of the input ends the process.
import { once } from 'node:events';
import { createServer } from 'node:http';
import { createInterface } from 'node:readline';
import expressFramework from 'express';
import { Redis } from 'ioredis';
import pg from 'pg';
import { express, MemoryStore, Oncegate, optionsFromNames, PostgresStore, RedisStore, UnknownSettingError } from '../dist/esm/index.js';

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
const open = new Map();

async function ask(address, execution) {
  const response = await fetch(`http://${address}/`, { method: 'POST', body: JSON.stringify(execution) });
  return response.json();
}

function openStore(url) {
  if (url === 'memory:') return { store: new MemoryStore(), close: () => undefined };
  if (url.startsWith('postgres')) {
    const pool = new pg.Pool({ connectionString: url, max: 10, connectionTimeoutMillis: 2000 });
    pool.on('error', () => undefined);
    return { store: new PostgresStore(pool), close: () => pool.end() };
  }
  const client = new Redis(url, { maxRetriesPerRequest: 1, enableOfflineQueue: true });
  client.on('error', () => undefined);
  return { store: new RedisStore(client), close: () => client.disconnect() };
}

/** Settings of the process, and not of a route. */
const SHARED = { 'max-in-flight': 'maxInFlight', 'max-in-flight-per-caller': 'maxInFlightPerCaller', 'store-timeout': 'storeTimeout', 'request-budget': 'requestBudget', 'response-budget': 'responseBudget', service: 'service' };

async function start({ settings, store: url }) {
  const shared = {};
  const named = {};
  for (const [name, value] of Object.entries(settings)) {
    if (name in SHARED) shared[SHARED[name]] = value;
    else named[name] = value;
  }
  const options = optionsFromNames(named);
  const { store, close } = openStore(url);
  const oncegate = new Oncegate({ service: 'cases', store, ...shared });
  const app = expressFramework();
  app.disable('x-powered-by');
  app.disable('etag');
  app.use(express(oncegate, options));
  app.use(async (req, res) => {
    const parts = [];
    for await (const part of req) parts.push(part);
    const { rawHeaders: raw } = req;
    const response = await ask(req.get('x-case'), {
      method: req.method,
      target: req.originalUrl,
      fields: raw.flatMap((name, i) => (i % 2 ? [] : [[name, raw[i + 1]]])),
      body: Buffer.concat(parts).toString('hex'),
    });
    res.status(response.status);
    for (const [name, value] of response.fields) res.append(name, value);
    res.send(Buffer.from(response.body, 'hex'));
  });
  const server = createServer(app);
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const address = `127.0.0.1:${server.address().port}`;
  open.set(address, () => { server.closeAllConnections(); server.close(); return close(); });
  say({ address });
}

for await (const line of createInterface({ input: process.stdin })) {
  if (line.trim() === '') continue;
  const command = JSON.parse(line);
  if (command.close !== undefined) {
    await open.get(command.close)?.();
    open.delete(command.close);
    say({ closed: command.close });
    continue;
  }
  try {
    await start(command);
  } catch (error) {
    if (error instanceof UnknownSettingError) {
      const kebab = error.setting.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
      say({ unsupported: kebab });
    } else if (error.name === 'SettingsError') say({ unsupported: error.message.split(':')[0].replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`) });
    else throw error;
  }
}
for (const close of open.values()) await close();
process.exit(0);
