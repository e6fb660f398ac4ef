// Services, storages and reloads for tests.
import { once } from 'node:events';
import { createServer } from 'node:http';

export async function serve(handler) {
  const server = createServer(handler).listen(0, '127.0.0.1');
  await once(server, 'listening');
  return { url: `http://127.0.0.1:${server.address().port}/`, close: () => { server.closeAllConnections(); server.close(); } };
}

/** A storage that outlives a page. */
export function storage() {
  const kept = new Map();
  return { kept, getItem: (id) => kept.get(id) ?? null, setItem: (id, text) => kept.set(id, text), removeItem: (id) => kept.delete(id) };
}

let loads = 0;
/** The library as a page has it after it was loaded again. */
export const load = () => import(`../dist/index.js?${(loads += 1)}`);
