// The routes of the order API.
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { setTimeout as sleep } from 'node:timers/promises';

import { parse as parseCsv } from 'csv-parse/sync';
import express from 'express';
import multer from 'multer';

import { delay, importedOrders, newOrder, orderChange } from './schemas.js';

const EVENT_INTERVAL_MS = 100;

class HttpError extends Error {
  constructor(status, message, details) {
    super(message);
    this.status = status;
    this.details = details;
  }
}

function validate(schema, value, what) {
  const { success, data, error } = schema.safeParse(value);
  if (!success) {
    const details = error.issues.map(({ path, message }) => ({ path: path.join('.'), message }));
    throw new HttpError(400, `invalid ${what}`, details);
  }
  return data;
}

export function createApp(store) {
  const app = express();
  const upload = multer({ limits: { fileSize: 1024 * 1024, files: 1 } });
  app.disable('x-powered-by');
  app.use(express.json());

  const found = (order, id) => {
    if (!order) throw new HttpError(404, `order ${id} not found`);
    return order;
  };

  app.param('id', (req, _res, next, id) => {
    if (!/^\d{1,15}$/.test(id)) throw new HttpError(404, `order ${id} not found`);
    req.orderId = Number(id);
    next();
  });

  app.get('/healthz', (_req, res) => {
    res.json({ status: 'ok' });
  });

  app.get('/ledger', (_req, res) => {
    res.json(store.ledger());
  });

  app.post('/orders', async (req, res) => {
    const delayMs = validate(delay, req.query.delay_ms, 'delay_ms');
    const [order] = store.create([validate(newOrder, req.body, 'order')]);
    // Stands for a slow payment provider: the order is stored, the response takes its time.
    await sleep(delayMs);
    res.status(201).location(`/orders/${order.id}`).json(order);
  });

  app.get('/orders', (_req, res) => {
    res.json(store.all());
  });

  app.post('/orders/import', upload.single('file'), (req, res) => {
    if (!req.file) throw new HttpError(400, 'send a CSV file in the form field "file"');
    const rows = parseCsv(req.file.buffer, { bom: true, columns: true, skip_empty_lines: true });
    const orders = store.create(validate(importedOrders, rows, 'CSV'));
    res.status(201).json({ imported: orders.length, ids: orders.map(({ id }) => id) });
  });

  app.get('/orders/export', async (_req, res) => {
    const lines = function* () {
      for (const order of store.stream()) yield `${JSON.stringify(order)}\n`;
    };
    res.type('application/x-ndjson');
    await pipeline(Readable.from(lines()), res);
  });

  app.get('/orders/:id', (req, res) => {
    res.json(found(store.get(req.orderId), req.orderId));
  });

  app.patch('/orders/:id', (req, res) => {
    const change = validate(orderChange, req.body, 'change');
    res.json(found(store.change(req.orderId, change), req.orderId));
  });

  app.delete('/orders/:id', (req, res) => {
    found(store.delete(req.orderId), req.orderId);
    res.status(204).end();
  });

  app.post('/orders/:id/pay', (req, res) => {
    res.status(201).json(found(store.charge(req.orderId), req.orderId));
  });

  // Starts the fulfilment, which leaves a note on the order, and reports its progress.
  app.post('/orders/:id/events', async (req, res) => {
    found(store.change(req.orderId, { add_note: 'fulfilment started' }), req.orderId);
    const events = async function* () {
      for (const step of ['accepted', 'packed', 'shipped']) {
        yield `event: ${step}\ndata: ${JSON.stringify({ order_id: req.orderId })}\n\n`;
        await sleep(EVENT_INTERVAL_MS);
      }
    };
    res.set({ 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache' });
    await pipeline(Readable.from(events()), res);
  });

  app.use((req) => {
    throw new HttpError(404, `no route ${req.method} ${req.path}`);
  });

  app.use((error, _req, res, next) => {
    if (error.code === 'ERR_STREAM_PREMATURE_CLOSE') return; // the client left
    if (res.headersSent) return next(error);
    const status = statusOf(error);
    if (status < 500) {
      return res.status(status).json({ error: error.message, details: error.details });
    }
    console.error(error);
    res.status(status).json({ error: 'internal error' });
  });

  return app;
}

function statusOf(error) {
  if (error instanceof multer.MulterError) return error.code === 'LIMIT_FILE_SIZE' ? 413 : 400;
  if (error.code?.startsWith('CSV_')) return 400;
  return error.status ?? 500;
}
