// PostgreSQL and Redis on free loopback ports, in temporary directories.
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { chownSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import { Redis } from 'ioredis';
import pg from 'pg';

async function freePort() {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address();
  server.close();
  await once(server, 'close');
  return port;
}

async function until(condition) {
  const deadline = Date.now() + 60_000;
  for (;;) {
    try {
      return await condition();
    } catch (error) {
      if (Date.now() > deadline) throw error;
      await pause(25);
    }
  }
}

const root = new URL('../../../', import.meta.url);

/** The SQL of the contract, as `oncegate schema print postgres` prints it. */
export function schema() {
  const names = readFileSync(new URL('crates/postgres/src/schema/mod.rs', root), 'utf8').matchAll(/include_str!\("..\/..\/sql\/(\w+\.sql)"\)/g);
  const parts = [...names].map(([, name]) => readFileSync(new URL(`crates/postgres/sql/${name}`, root), 'utf8'));
  return `BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;\n${parts.join('\n')}\nCOMMIT;`;
}

/** A server; as root it runs as another user, because PostgreSQL refuses root. */
export async function startPostgres() {
  const version = readdirSync('/usr/lib/postgresql').sort((one, other) => Number(other) - Number(one))[0];
  const bin = `/usr/lib/postgresql/${version}/bin`;
  const dir = mkdtempSync(join(tmpdir(), 'oncegate-node-postgres-'));
  const user = process.getuid() === 0 ? readFileSync('/etc/passwd', 'utf8').match(/^(?:postgres|nobody):[^:]*:(\d+):(\d+)/m).slice(1).map(Number) : undefined;
  if (user !== undefined) chownSync(dir, ...user);
  const as = { cwd: dir, env: { ...process.env, LC_ALL: 'C' }, ...(user === undefined ? {} : { uid: user[0], gid: user[1] }) };
  execFileSync(`${bin}/initdb`, ['-D', join(dir, 'data'), '-U', 'owner', '-A', 'trust', '-E', 'UTF8', '--locale=C', '--no-sync'], { ...as, stdio: 'pipe' });
  const port = await freePort();
  const child = spawn(`${bin}/postgres`, ['-D', join(dir, 'data'), '-p', port, '-k', '', '-c', 'listen_addresses=127.0.0.1', '-c', 'fsync=off'], { ...as, stdio: 'ignore' });
  const url = `postgres://owner@127.0.0.1:${port}/postgres`;
  const stop = async () => {
    const ended = once(child, 'exit');
    child.kill('SIGINT');
    await ended;
    rmSync(dir, { recursive: true, force: true });
  };
  await until(async () => {
    const client = new pg.Client(url);
    client.on('error', () => undefined);
    try {
      await client.connect();
      await client.query(schema());
    } finally {
      await client.end().catch(() => undefined);
    }
  });
  return { url, stop, child };
}

export async function startRedis() {
  const dir = mkdtempSync(join(tmpdir(), 'oncegate-node-redis-'));
  const port = await freePort();
  const child = spawn('redis-server', ['--port', port, '--bind', '127.0.0.1', '--dir', dir, '--save', '', '--appendonly', 'no'], { stdio: 'ignore' });
  const url = `redis://127.0.0.1:${port}`;
  await until(async () => {
    const client = new Redis(url, { lazyConnect: true, retryStrategy: () => null });
    client.on('error', () => undefined);
    try {
      await client.connect();
      await client.ping();
    } finally {
      client.disconnect();
    }
  });
  const stop = async () => {
    const ended = once(child, 'exit');
    child.kill('SIGKILL');
    await ended;
    rmSync(dir, { recursive: true, force: true });
  };
  return { url, stop, child };
}
