// Orders in SQLite. Every write is one transaction.
import Database from 'libsql';

const SCHEMA = `
  CREATE TABLE IF NOT EXISTS orders (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    customer    TEXT NOT NULL,
    total_cents INTEGER NOT NULL,
    status      TEXT NOT NULL DEFAULT 'pending',
    created_at  TEXT NOT NULL
  );
  CREATE TABLE IF NOT EXISTS items (
    id          INTEGER PRIMARY KEY,
    order_id    INTEGER NOT NULL REFERENCES orders (id) ON DELETE CASCADE,
    sku         TEXT NOT NULL,
    quantity    INTEGER NOT NULL,
    price_cents INTEGER NOT NULL
  );
  CREATE INDEX IF NOT EXISTS items_by_order ON items (order_id);
  CREATE TABLE IF NOT EXISTS notes (
    id         INTEGER PRIMARY KEY,
    order_id   INTEGER NOT NULL REFERENCES orders (id) ON DELETE CASCADE,
    text       TEXT NOT NULL,
    created_at TEXT NOT NULL
  );
  CREATE INDEX IF NOT EXISTS notes_by_order ON notes (order_id);
  -- A charge outlives its order: the money has moved.
  CREATE TABLE IF NOT EXISTS charges (
    id           INTEGER PRIMARY KEY,
    order_id     INTEGER NOT NULL,
    amount_cents INTEGER NOT NULL,
    created_at   TEXT NOT NULL
  );
`;

const EXPORT_BATCH = 100;

const now = () => new Date().toISOString();

export class OrderStore {
  #db;

  constructor(path) {
    this.#db = new Database(path);
    this.#db.pragma('journal_mode = WAL');
    this.#db.pragma('busy_timeout = 10000');
    this.#db.pragma('foreign_keys = ON');
    this.#db.exec(SCHEMA);
  }

  close() {
    this.#db.close();
  }

  /** Inserts all the orders or none, and returns them. */
  create(orders) {
    return this.#transaction(() => orders.map((order) => this.#insert(order)));
  }

  all() {
    return this.#orders('ORDER BY id');
  }

  get(id) {
    return this.#orders('WHERE id = ?', id)[0];
  }

  /** Changes the status, appends a note, or both; undefined if there is no such order. */
  change(id, { status, add_note: note }) {
    return this.#transaction(() => {
      if (!this.get(id)) return undefined;
      if (status) this.#run('UPDATE orders SET status = ? WHERE id = ?', status, id);
      if (note) {
        this.#run(
          'INSERT INTO notes (order_id, text, created_at) VALUES (?, ?, ?)',
          id, note, now(),
        );
      }
      return this.get(id);
    });
  }

  /** Charges the order's total; undefined if there is no such order. */
  charge(id) {
    return this.#transaction(() => {
      const order = this.get(id);
      if (!order) return undefined;
      const charge = { order_id: id, amount_cents: order.total_cents, created_at: now() };
      const { lastInsertRowid } = this.#run(
        'INSERT INTO charges (order_id, amount_cents, created_at) VALUES (?, ?, ?)',
        charge.order_id, charge.amount_cents, charge.created_at,
      );
      this.#run("UPDATE orders SET status = 'paid' WHERE id = ?", id);
      return { id: lastInsertRowid, ...charge };
    });
  }

  /** False if there is no such order. */
  delete(id) {
    return this.#run('DELETE FROM orders WHERE id = ?', id).changes > 0;
  }

  ledger() {
    const { orders, charges, notes } = this.#db
      .prepare(
        `SELECT (SELECT count(*) FROM orders) AS orders,
                (SELECT count(*) FROM charges) AS charges,
                (SELECT count(*) FROM notes) AS notes`,
      )
      .get();
    return { orders, charges, notes };
  }

  /** Every order, in batches: a slow reader holds neither a lock nor the whole table. */
  *stream() {
    for (let last = 0; ; ) {
      const batch = this.#orders('WHERE id > ? ORDER BY id LIMIT ?', last, EXPORT_BATCH);
      if (batch.length === 0) return;
      yield* batch;
      last = batch.at(-1).id;
    }
  }

  #insert({ customer, items }) {
    const total = items.reduce((sum, item) => sum + item.quantity * item.price_cents, 0);
    const { lastInsertRowid: id } = this.#run(
      'INSERT INTO orders (customer, total_cents, created_at) VALUES (?, ?, ?)',
      customer, total, now(),
    );
    for (const { sku, quantity, price_cents } of items) {
      this.#run(
        'INSERT INTO items (order_id, sku, quantity, price_cents) VALUES (?, ?, ?, ?)',
        id, sku, quantity, price_cents,
      );
    }
    return this.get(id);
  }

  #orders(clause, ...values) {
    const items = this.#db.prepare(
      'SELECT sku, quantity, price_cents FROM items WHERE order_id = ? ORDER BY id',
    );
    const notes = this.#db.prepare('SELECT text FROM notes WHERE order_id = ? ORDER BY id');
    return this.#db
      .prepare(`SELECT id, customer, total_cents, status, created_at FROM orders ${clause}`)
      .all(...values)
      .map(({ id, customer, total_cents, status, created_at }) => ({
        id,
        customer,
        items: items.all(id),
        total_cents,
        status,
        notes: notes.all(id).map(({ text }) => text),
        created_at,
      }));
  }

  #run(sql, ...values) {
    return this.#db.prepare(sql).run(...values);
  }

  #transaction(work) {
    return this.#db.transaction(work).immediate();
  }
}
