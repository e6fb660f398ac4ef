// PostgreSQL and Redis on free loopback ports, in temporary directories.
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { chownSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { createServer as createHttpServer } from 'node:http';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
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

export async function until(condition) {
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
  const run = (...options) => spawn('redis-server', ['--port', port, '--bind', '127.0.0.1', '--dir', dir, '--save', '', '--appendonly', 'no', ...options], { stdio: 'ignore' });
  let child = run();
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
  const kill = async () => {
    const ended = child.exitCode === null && child.signalCode === null ? once(child, 'exit') : undefined;
    child.kill('SIGKILL');
    await ended;
  };
  const stop = async () => {
    await kill();
    rmSync(dir, { recursive: true, force: true });
  };
  return { url, kill, start: (...options) => { child = run(...options); }, stop, child };
}

/** A Cluster of three nodes without replicas; the keys of a node that is away have no other one. */
export async function startRedisCluster() {
  const dir = mkdtempSync(join(tmpdir(), 'oncegate-node-cluster-'));
  const nodes = new Map();
  for (let at = 0; at < 3; at += 1) {
    const [port, bus] = [await freePort(), await freePort()];
    const own = join(dir, `${port}`);
    mkdirSync(own);
    const run = () => nodes.set(`127.0.0.1:${port}`, { run, child: spawn('redis-server', ['--port', port, '--cluster-port', bus, '--bind', '127.0.0.1', '--dir', own, '--save', '', '--appendonly', 'yes', '--cluster-enabled', 'yes', '--cluster-require-full-coverage', 'no', '--cluster-node-timeout', '2000'], { stdio: 'ignore' }) });
    run();
  }
  const addresses = [...nodes.keys()];
  const cli = (address, ...args) => execFileSync('redis-cli', ['-p', address.split(':')[1], ...args], { encoding: 'utf8', stdio: 'pipe' });
  await until(() => { for (const address of addresses) cli(address, 'PING'); });
  execFileSync('redis-cli', ['--cluster', 'create', ...addresses, '--cluster-replicas', '0', '--cluster-yes'], { stdio: 'pipe' });
  await until(() => { for (const address of addresses) if (!cli(address, 'CLUSTER', 'INFO').includes('cluster_state:ok')) throw new Error('there is no Cluster yet'); });
  const kill = async (address) => {
    const { child } = nodes.get(address);
    const ended = once(child, 'exit');
    child.kill('SIGKILL');
    await ended;
  };
  const stop = async () => {
    for (const [address, { child }] of nodes) if (child.exitCode === null && child.signalCode === null) await kill(address);
    rmSync(dir, { recursive: true, force: true });
  };
  return { addresses, cli, kill, stop, start: (address) => nodes.get(address).run() };
}

/** The program `oncegate`, if it was built. */
export const program = [process.env.ONCEGATE_BIN, fileURLToPath(new URL('target/debug/oncegate', root))].find((path) => path && existsSync(path));
/** The options of a test that needs the program. */
export const needsProgram = { skip: program === undefined && 'the program oncegate is not built, and ONCEGATE_BIN does not name it' };

/** A sidecar in front of a service that counts its executions. */
export async function startSidecar(store, idSecret, ...options) {
  const port = await freePort();
  const own = { executions: 0, host: `127.0.0.1:${port}` };
  const service = createHttpServer((req, res) => {
    if (req.method === 'POST') own.executions += 1;
    req.resume().on('end', () => res.writeHead(201).end('made by the service of the sidecar'));
  }).listen(0, '127.0.0.1');
  await once(service, 'listening');
  const child = spawn(program, ['proxy', `--listen=127.0.0.1:${port}`, '--admin=127.0.0.1:0', `--to=http://127.0.0.1:${service.address().port}`, `--store=${store}`, ...options], {
    env: { PATH: process.env.PATH, ...(idSecret === undefined ? {} : { ONCEGATE_ID_SECRET: idSecret }) },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  own.log = '';
  child.stderr.on('data', (text) => { own.log += text; });
  own.post = (key, body = '5') => fetch(`http://127.0.0.1:${port}/pay`, { method: 'POST', headers: { 'idempotency-key': key }, body });
  own.stop = async () => {
    const ended = child.exitCode === null ? once(child, 'exit') : undefined;
    child.kill('SIGKILL');
    await ended;
    service.closeAllConnections();
    service.close();
  };
  await until(() => fetch(`http://127.0.0.1:${port}/`)).catch((error) => { console.error(own.log); throw error; });
  return own;
}
