// Orders and charges in PostgreSQL, each committed in one transaction with the record of its Idempotency-Key.
// For `oncegate proxy --completion upstream --reconcile-path /oncegate/outcome` on the same database.
// Environment: DATABASE_URL, PORT, HOST.
import { setTimeout as sleep } from 'node:timers/promises';

import express from 'express';
import pg from 'pg';

import { delay, newOrder } from './schemas.js';

const SCHEMA = `
  CREATE TABLE IF NOT EXISTS orders (
    id          integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer    text NOT NULL,
    items       jsonb NOT NULL,
    total_cents integer NOT NULL,
    status      text NOT NULL DEFAULT 'pending',
    created_at  timestamptz NOT NULL DEFAULT now()
  );
  CREATE TABLE IF NOT EXISTS charges (
    id           integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id     integer NOT NULL REFERENCES orders (id),
    amount_cents integer NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    -- The attempt that made it, to find it by when the sidecar asks.
    record       bytea,
    token        bigint,
    UNIQUE (record, token)
  );
`;

const CHARGE = 'id, order_id, amount_cents, created_at';

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });
pool.on('error', (error) => console.error('an idle connection broke:', error.message));
await pool.query(SCHEMA);

async function transaction(work) {
  const db = await pool.connect();
  let broken;
  try {
    await db.query('BEGIN');
    const result = await work(db);
    await db.query('COMMIT');
    return result;
  } catch (error) {
    await db.query('ROLLBACK').catch((rollback) => (broken = rollback));
    throw error;
  } finally {
    db.release(broken);
  }
}

/** What the sidecar says of a request that has a key. */
function attemptOf(req) {
  const record = req.get('Oncegate-Record');
  return record ? [Buffer.from(record, 'hex'), req.get('Oncegate-Token')] : undefined;
}

/**
 * The last statement of a transaction, if the sidecar says that the request has a key: throws if another attempt owns the
 * record by now. With a response, retries get it from the commit on, even if nobody lives to send it; without, the sidecar adds it.
 */
async function complete(db, req, response) {
  const attempt = attemptOf(req);
  if (!attempt) return;
  if (!response) return db.query('SELECT oncegate.complete($1, $2)', attempt);
  const { status, fields, body } = response;
  const stored = [status, Object.keys(fields), Object.values(fields), Buffer.from(body)];
  return db.query('SELECT oncegate.complete($1, $2, oncegate.response($3, $4, $5, $6))', [...attempt, ...stored]);
}

const app = express();
app.disable('x-powered-by');
app.use(express.json());

// Completes its record with the response.
app.post('/orders', async (req, res) => {
  const { success, data: order, error } = newOrder.safeParse(req.body);
  if (!success) return res.status(400).json({ error: error.message });
  const delayMs = delay.safeParse(req.query.delay_ms);
  if (!delayMs.success) return res.status(400).json({ error: `delay_ms: ${delayMs.error.message}` });
  const total = order.items.reduce((sum, item) => sum + item.quantity * item.price_cents, 0);
  const response = await transaction(async (db) => {
    const { rows: [row] } = await db.query(
      'INSERT INTO orders (customer, items, total_cents) VALUES ($1, $2, $3) RETURNING *',
      [order.customer, JSON.stringify(order.items), total],
    );
    const fields = { 'Content-Type': 'application/json; charset=utf-8', Location: `/orders/${row.id}` };
    const response = { status: 201, fields, body: JSON.stringify(row) };
    await complete(db, req, response);
    return response;
  });
  // Stands for a slow network: the order is committed, the response takes its time.
  await sleep(delayMs.data);
  // `send` would add a field, an ETag, that the record does not have.
  res.writeHead(response.status, response.fields).end(response.body);
});

// Completes its record without the response, which the sidecar adds.
app.post('/orders/:id/pay', async (req, res) => {
  const charge = await transaction(async (db) => {
    const { rows: [order] } = await db.query(
      "UPDATE orders SET status = 'paid' WHERE id = $1 RETURNING total_cents",
      [req.params.id],
    );
    if (!order) return undefined;
    const { rows: [row] } = await db.query(
      `INSERT INTO charges (order_id, amount_cents, record, token) VALUES ($1, $2, $3, $4) RETURNING ${CHARGE}`,
      [req.params.id, order.total_cents, ...(attemptOf(req) ?? [null, null])],
    );
    await complete(db, req);
    return row;
  });
  if (!charge) return res.status(404).json({ error: `order ${req.params.id} not found` });
  res.status(201).json(charge);
});

// Gives the response of a payment once more, if nobody lived to add it to its record.
app.get('/oncegate/outcome', async (req, res) => {
  const attempt = attemptOf(req);
  if (!attempt) return res.status(400).json({ error: 'only the sidecar asks here' });
  res.set({ 'Oncegate-Record': req.get('Oncegate-Record'), 'Oncegate-Token': req.get('Oncegate-Token') });
  const find = `SELECT ${CHARGE} FROM charges WHERE record = $1 AND token = $2`;
  const { rows: [charge] } = await pool.query(find, attempt);
  if (!charge) return res.set('Oncegate-Outcome', 'unknown').status(404).json({ error: 'no such charge' });
  res.set('Oncegate-Outcome', 'happened').status(201).json(charge);
});

app.get('/orders', async (_req, res) => {
  res.json((await pool.query('SELECT * FROM orders ORDER BY id')).rows);
});

app.get('/ledger', async (_req, res) => {
  const counts = `SELECT (SELECT count(*)::int FROM orders) AS orders, (SELECT count(*)::int FROM charges) AS charges`;
  res.json((await pool.query(counts)).rows[0]);
});

// A server error decides nothing, and the sidecar finds out what was committed. That is also right if the reply to COMMIT was
// lost: it may still run, and until it ends, no query shows whether it will succeed.
app.use((error, _req, res, next) => {
  if (res.headersSent) return next(error);
  console.error(error);
  res.status(error.status ?? 503).json({ error: error.status ? error.message : `the database refused: ${error.code}` });
});

const port = Number(process.env.PORT ?? 3000);
const host = process.env.HOST ?? '127.0.0.1';
const server = app.listen(port, host, (error) => {
  if (error) throw error;
  console.log(`listening on http://${host}:${server.address().port}`);
});

function stop() {
  // Requests in flight get their response; whatever is still open after ten seconds is cut.
  server.close(() => pool.end());
  setInterval(() => server.closeIdleConnections(), 100).unref();
  setTimeout(() => process.exit(1), 10_000).unref();
}
process.once('SIGTERM', stop);
process.once('SIGINT', stop);
