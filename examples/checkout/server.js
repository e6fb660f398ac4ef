// The shop: its page, the bank with its ledger, and a network that loses what it is told to lose, before two payment services. One is
// protected: by the library in its process, or with `--sidecar` by a sidecar before it.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createServer, request as send } from 'node:http';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import express from 'express';

const here = fileURLToPath(new URL('.', import.meta.url));
const hasSidecar = process.argv.includes('--sidecar');
const port = Number(process.env.PORT ?? 4000);
const LANES = ['plain', 'safe'];
const FAULTS = ['lose-reply', 'crash', 'slow'];
const MAX_CHARGES = 200;

// The bank. It charges once for each key, as banks do. Without a key each request is a payment.
let charges = [];
let number = 0;
let orders = 0;
const requests = { plain: 0, safe: 0 };
const armed = new Map();

function chargeAt(lane, key, { item, amount }) {
  const known = key && charges.find((charge) => charge.lane === lane && charge.key === key);
  if (known) return known;
  number += 1;
  const charge = { number, lane, key, item, amount };
  charges = [...charges, charge].slice(-MAX_CHARGES);
  return charge;
}

/** A program that is started again when it dies. `address` waits until it listens. */
class Program {
  address;

  constructor(command, args, env, isDone = () => false) {
    this.start = () => {
      const child = spawn(command, args, { cwd: here, env: { ...process.env, ...env }, stdio: ['pipe', 'pipe', 'inherit'] });
      this.child = child;
      this.address = new Promise((resolve, reject) => {
        createInterface({ input: child.stdout }).on('line', (line) => {
          const found = /listening on http:\/\/([\d.:]+)/.exec(line);
          if (found) resolve(found[1]);
        });
        child.on('error', reject);
        child.on('exit', (code, signal) => { reject(new Error(`${command} ended with ${code ?? signal}`)); });
      });
      this.address.catch(() => undefined);
      child.on('error', (error) => { console.error(String(error)); process.exit(1); });
      child.on('exit', () => { if (!this.isStopped && !isDone()) this.start(); });
    };
    this.start();
  }

  stop() {
    this.isStopped = true;
    this.child.kill('SIGTERM');
  }
}

const app = express();
app.disable('x-powered-by');

app.post('/bank/:lane', express.json(), (req, res) => {
  res.status(201).json({ number: chargeAt(req.params.lane, req.get('idempotency-key'), req.body).number });
});
app.get('/api/ledger', (req, res) => {
  res.set('cache-control', 'no-store').json({ charges: charges.map(({ key, ...charge }) => charge), orders, requests, protection: hasSidecar ? 'sidecar' : 'library' });
});
app.post('/api/reset', (req, res) => {
  charges = [];
  number = 0;
  orders = 0;
  Object.assign(requests, { plain: 0, safe: 0 });
  armed.clear();
  res.status(204).end();
});
// A customer wants something. However often a button is pressed for it, it is one order.
app.post('/api/orders', (req, res) => {
  orders += 1;
  res.status(204).end();
});
// The next payment in each lane gets this fault.
app.post('/api/faults/:fault', (req, res) => {
  if (!FAULTS.includes(req.params.fault)) return res.status(404).end();
  for (const lane of LANES) armed.set(lane, req.params.fault);
  return res.status(204).end();
});

// The network between the page and a service.
app.post('/:lane/charges', express.raw({ type: () => true, limit: '64kb' }), async (req, res, next) => {
  const { lane } = req.params;
  if (!LANES.includes(lane)) return next();
  requests[lane] += 1;
  const fault = armed.get(lane);
  armed.delete(lane);
  try {
    const [hostname, at] = (await ways[lane].address).split(':');
    const headers = { 'content-type': req.get('content-type') ?? '', 'content-length': req.body.length, ...(fault && { 'x-fault': fault }) };
    const key = req.get('idempotency-key');
    if (key !== undefined) headers['idempotency-key'] = key;
    // Not stopped if the page goes away: what was sent was sent.
    const onward = send({ hostname, port: at, method: 'POST', path: '/charges', headers, agent: false });
    onward.end(req.body);
    const [answer] = await once(onward, 'response');
    const parts = [];
    for await (const part of answer) parts.push(part);
    const { connection, 'transfer-encoding': coding, ...fields } = answer.headers;
    res.writeHead(answer.statusCode, { ...fields, 'content-length': Buffer.concat(parts).length });
    // The head arrives, and then the connection breaks.
    if (fault === 'lose-reply') {
      res.flushHeaders();
      setTimeout(() => { res.destroy(); }, 50);
      return undefined;
    }
    return res.end(Buffer.concat(parts));
  } catch {
    return res.headersSent ? res.destroy() : res.status(502).json({ error: 'the service did not answer' });
  }
});
app.use(express.static(`${here}dist`));

const server = createServer(app).listen(port, '127.0.0.1');
await once(server, 'listening');
const own = `http://127.0.0.1:${server.address().port}`;
const service = (lane, ...flags) => new Program(process.execPath, ['service.js', ...flags], { BANK: `${own}/bank/${lane}` });
const programs = [service('plain'), service('safe', ...(hasSidecar ? [] : ['--protected']))];
const ways = { plain: programs[0], safe: programs[1] };
if (hasSidecar) {
  // The sidecar has one address of its service for its whole life, so a small relay goes to the service that is there now.
  const relay = createServer(async (req, res) => {
    try {
      const [hostname, at] = (await programs[1].address).split(':');
      const onward = send({ hostname, port: at, method: req.method, path: req.url, headers: req.headers, agent: false });
      req.pipe(onward);
      const [answer] = await once(onward, 'response');
      res.writeHead(answer.statusCode, answer.headers);
      answer.pipe(res);
    } catch {
      res.destroy();
    }
  }).listen(0, '127.0.0.1');
  await once(relay, 'listening');
  ways.safe = new Program(process.env.ONCEGATE ?? 'oncegate', [
    'proxy', '--to', `http://127.0.0.1:${relay.address().port}`, '--listen', '127.0.0.1:0', '--admin', '127.0.0.1:0', '--store', 'memory:',
    '--scope', 'single-tenant',
  ], {});
  programs.push(ways.safe);
}
await Promise.all(Object.values(ways).map(({ address }) => address));
console.log(`The shop is open: ${own}`);

for (const signal of ['SIGTERM', 'SIGINT']) {
  process.on(signal, () => {
    for (const program of programs) program.stop();
    process.exit(0);
  });
}
