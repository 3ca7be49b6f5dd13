"""Draw the CPU time per request as bars in SVG: the time of the gateway is dark, the time of Redis is light."""


def bars(title, rows):
    """Return a chart. Each of the `rows` has a label, the CPU time of the gateway and the CPU time of Redis, in µs."""
    most = max(gateway + redis for _, gateway, redis in rows)
    scale, height = 420 / most, 34 * len(rows) + 56
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="13">',
           f'<rect width="760" height="{height}" fill="#ffffff"/>',
           f'<text x="12" y="22" font-weight="bold">{title}, µs: gateway (dark), Redis (light)</text>']
    for index, (label, gateway, redis) in enumerate(rows):
        y, dark, light = 38 + 34 * index, gateway * scale, redis * scale
        out += [f'<text x="12" y="{y + 16}">{label}</text>',
                f'<rect x="230" y="{y}" width="{dark:.1f}" height="24" fill="#1f5a7a"/>',
                f'<rect x="{230 + dark:.1f}" y="{y}" width="{light:.1f}" height="24" fill="#9cc5db"/>',
                f'<text x="{236 + dark + light:.1f}" y="{y + 16}">{gateway:.0f} + {redis:.0f}</text>']
    return "\n".join(out + ["</svg>", ""])
