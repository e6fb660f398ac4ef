// The service of the benchmarks on Express, with nothing around it (`bare`) or with the library that is named, each as its
// README shows it. Those with `-redis` keep their records at the socket that the second argument names, the others in memory.
import { setTimeout as sleep } from 'node:timers/promises';

import { Idempotency } from '@node-idempotency/core';
import { MemoryStorageAdapter } from '@node-idempotency/storage-adapter-memory';
import express from 'express';
import expressIdempotency from 'express-idempotency';

const [, , library, socket] = process.argv;
const app = express();
if (library === 'oncegate' || library === 'oncegate-redis') {
  const { express: once, MemoryStore, Oncegate, RedisStore } = await import('oncegate');
  const { default: Redis } = await import('ioredis');
  const store = library === 'oncegate' ? new MemoryStore() : new RedisStore(new Redis({ path: socket }));
  app.use(once(new Oncegate({ store, service: `bench-${process.pid}` }), { scope: 'single-tenant' }));
}
app.use(express.json());

// Whether a library has answered already. It does so, and still calls the handler.
let answered = () => false;

if (library === 'express-idempotency') {
  app.post('*', expressIdempotency.idempotency());
  answered = (req) => expressIdempotency.getSharedIdempotencyService().isHit(req);
} else if (library === 'node-idempotency' || library === 'node-idempotency-redis') {
  let storage = new MemoryStorageAdapter();
  if (library === 'node-idempotency-redis') {
    const { RedisStorageAdapter } = await import('@node-idempotency/storage-adapter-redis');
    storage = new RedisStorageAdapter({ socket: { path: socket } });
    await storage.connect();
  }
  const idempotency = new Idempotency(storage, {});
  const statuses = { REQUEST_IN_PROGRESS: 409, IDEMPOTENCY_FINGERPRINT_MISSMATCH: 422 };
  app.use(async (req, res, next) => {
    const { method, path, headers, body } = req;
    const request = { method, path, headers, body };
    try {
      const known = await idempotency.onRequest(request);
      if (known) return res.status(known.additional.status).send(known.body);
    } catch (error) {
      return res.status(statuses[error.code] ?? 400).json({ error: error.message });
    }
    const send = res.send;
    res.send = (response) => {
      res.send = send;
      idempotency.onResponse(request, { body: response, additional: { status: res.statusCode } }).then(
        () => res.send(response),
        next,
      );
      return res;
    };
    next();
  });
}

let executions = 0;
const failed = new Set();

app.post('/pay', (req, res) => {
  if (answered(req)) return;
  res.json(req.body);
});

app.post('/work', async (req, res) => {
  if (answered(req)) return;
  const execution = ++executions;
  await sleep(100);
  res.status(201).json({ execution });
});

app.post('/fail', (req, res) => {
  if (answered(req)) return;
  const execution = ++executions;
  const key = req.get('Idempotency-Key');
  if (!failed.has(key)) {
    failed.add(key);
    throw new Error('failed');
  }
  res.status(201).json({ execution });
});

app.get('/executions', (_req, res) => {
  res.json(executions);
});

app.use((error, _req, res, _next) => {
  res.status(res.statusCode < 400 ? 500 : res.statusCode).json({ error: error.message });
});

const server = app.listen(0, '127.0.0.1', () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
