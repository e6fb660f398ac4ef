// A service for tests of processes: with the argument `cluster`, of four workers.
import cluster from 'node:cluster';
import { once } from 'node:events';
import { createServer } from 'node:http';
import expressFramework from 'express';
import { Redis } from 'ioredis';
import pg from 'pg';
import { express, Oncegate, PostgresStore, RedisStore } from '../dist/esm/index.js';

const [url, ledger, workers = '1', port = '0'] = process.argv.slice(2);

if (cluster.isPrimary && workers !== '1') {
  let ready = 0;
  for (let at = 0; at < Number(workers); at += 1) cluster.fork();
  cluster.on('listening', (_, { port }) => { if ((ready += 1) === Number(workers)) console.log(port); });
  // Replaces one worker after the other.
  process.on('SIGHUP', async () => {
    for (const worker of Object.values(cluster.workers)) {
      const next = cluster.fork();
      await once(next, 'listening');
      const ended = once(worker, 'exit');
      worker.process.kill('SIGTERM');
      const [code] = await ended;
      if (code !== 0) throw new Error(`a worker ended with ${code}`);
    }
    console.log('replaced');
  });
  process.on('SIGTERM', () => { for (const worker of Object.values(cluster.workers)) worker.process.kill('SIGTERM'); });
  cluster.on('exit', () => { if (Object.keys(cluster.workers).length === 0) process.exit(0); });
} else {
  const book = new pg.Pool({ connectionString: ledger, max: 4 });
  book.on('error', () => undefined);
  const store = url.startsWith('postgres')
    ? new PostgresStore(new pg.Pool({ connectionString: url, max: 10, connectionTimeoutMillis: 2000 }))
    : new RedisStore(new Redis(url));
  const oncegate = new Oncegate({ store, service: 'shop' });
  const app = expressFramework();
  app.use(express(oncegate, { scope: 'single-tenant', lease: '1s', onAbandoned: 'reexecute', wait: '10s' }));
  app.post('/pay', async (req, res) => {
    await book.query('INSERT INTO charges (name) VALUES ($1)', [req.query.name]);
    const pause = Number(req.query.pause ?? 0);
    await new Promise((resolve) => setTimeout(resolve, pause));
    res.status(201).json({ pid: process.pid });
  });
  const server = createServer(app).listen(Number(port), '127.0.0.1', () => { if (!cluster.isWorker) console.log(server.address().port); });
  process.on('SIGTERM', async () => {
    await oncegate.shutdown(server);
    process.exit(0);
  });
}
