// Starts the API: PORT (0 = any free port), HOST, DATABASE.
import { createApp } from './app.js';
import { OrderStore } from './store.js';

const port = Number(process.env.PORT ?? 3000);
const host = process.env.HOST ?? '127.0.0.1';
const store = new OrderStore(process.env.DATABASE ?? './orders.db');

const server = createApp(store).listen(port, host, (error) => {
  if (error) throw error;
  console.log(`listening on http://${host}:${server.address().port}`);
});

function stop() {
  // Requests in flight get their response; whatever is still open after ten seconds is cut.
  server.close(() => store.close());
  setInterval(() => server.closeIdleConnections(), 100).unref();
  setTimeout(() => process.exit(1), 10_000).unref();
}
process.once('SIGTERM', stop);
process.once('SIGINT', stop);
