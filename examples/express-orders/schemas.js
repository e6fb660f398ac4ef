// What the API accepts.
import { z } from 'zod';

const customer = z.string().trim().min(1).max(200);
const sku = z.string().trim().min(1).max(64);
const quantity = z.int().min(1).max(10_000);
const priceCents = z.int().min(0).max(100_000_000);

export const newOrder = z.object({
  customer,
  items: z.array(z.object({ sku, quantity, price_cents: priceCents })).min(1).max(100),
});

export const orderChange = z
  .object({
    status: z.enum(['pending', 'paid', 'shipped', 'cancelled']).optional(),
    add_note: z.string().trim().min(1).max(1000).optional(),
  })
  .refine((change) => change.status || change.add_note, 'give "status", "add_note" or both');

/** A number in a CSV file or a query string is a run of digits. */
const digits = (schema) =>
  z.string().regex(/^\d{1,15}$/, 'expected a whole number').transform(Number).pipe(schema);

export const delay = digits(z.int().max(60_000)).default(0);

export const importedOrders = z
  .array(
    z
      .object({ customer, sku, quantity: digits(quantity), price_cents: digits(priceCents) })
      .transform(({ customer, ...item }) => ({ customer, items: [item] })),
  )
  .min(1)
  .max(10_000);
